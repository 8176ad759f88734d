"""The ways to divide the sparsity among layers a recipe may ask for: name, options, what to run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from symprune.allocate import budget
from symprune.errors import SympruneError
from symprune.validation import check_positive, choose, written


@dataclass(frozen=True)
class OWL:
    """OWL (Yin et al., 2024): blocks with more outliers give less.

    outlier: scores above so many times the mean are outliers. spread: the blocks' sparsities cover
    a range of twice this, with the whole's as their mean.
    """

    name: ClassVar[str] = "owl"
    looks_at_outputs: ClassVar[bool] = False
    outlier: float = 5.0
    spread: float = 0.08

    def __post_init__(self) -> None:
        check_positive(outlier=self.outlier)
        _check_spread(self.spread)

    def measure(
        self, layer: budget.Layer, score: Tensor, output_norm: Tensor, sparsity: float
    ) -> budget.Layer:
        return replace(layer, outliers=budget.outliers(score, self.outlier))

    def __call__(self, layers: list[budget.Layer], sparsity: float) -> dict[str, int]:
        return budget.owl(layers, sparsity, self.spread)


@dataclass(frozen=True)
class ByError:
    """The budget is spent where the measured error per removed weight is smallest.

    spread: no matrix's sparsity is further than this from the whole's.
    """

    name: ClassVar[str] = "error"
    looks_at_outputs: ClassVar[bool] = True
    spread: float = 0.1

    def __post_init__(self) -> None:
        _check_spread(self.spread)

    def measure(
        self, layer: budget.Layer, score: Tensor, output_norm: Tensor, sparsity: float
    ) -> budget.Layer:
        count, price = budget.prices(score, output_norm, sparsity, self.spread)
        return replace(layer, count=count, price=price)

    def __call__(self, layers: list[budget.Layer], sparsity: float) -> dict[str, int]:
        return budget.by_error(layers)


Allocation = OWL | ByError
ALLOCATIONS: dict[str, type[Any]] = {kind.name: kind for kind in (OWL, ByError)}


def chosen_allocation(options: Any) -> Allocation | None:
    """What a recipe's `allocate` says: nothing or `uniform`, a name, or a name with options."""
    return None if options == "uniform" else choose("allocation", ALLOCATIONS, options)


def to_dict(chosen: Allocation | None) -> dict[str, Any] | None:
    return None if chosen is None else written(chosen.name, chosen)


def _check_spread(spread: float) -> None:
    if not 0 < spread < 1:
        raise SympruneError(f"spread must lie between 0 and 1, not {spread}.")
