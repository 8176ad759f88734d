"""The updates of the kept weights a recipe may ask for: name, options, what to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from symprune.masks import Pattern
from symprune.stats import GRAM, SHRINK, ChannelStats
from symprune.update import alternating, least_squares
from symprune.validation import check_not_negative, check_positive, choose, written


@dataclass(frozen=True)
class LeastSquares:
    """Kept weights re-fitted to the dense layer's outputs by masked conjugate gradients.

    rounds: above 1, mask and weights are found in turn (`alternate`), with round_iters steps a
    round. damping: in units of G's mean diagonal. shrink: how far measured correlations are
    distrusted, in units of channels / tokens.
    """

    name: ClassVar[str] = "lsq"
    needs: ClassVar[str] = GRAM
    iters: int = 20
    damping: float = 0.01
    shrink: float = SHRINK
    tolerance: float = 1e-3
    rounds: int = 1
    round_iters: int = 4

    def __post_init__(self) -> None:
        check_positive(iters=self.iters, damping=self.damping, tolerance=self.tolerance)
        check_positive(rounds=self.rounds, round_iters=self.round_iters)
        check_not_negative(shrink=self.shrink)

    @property
    def finds_mask(self) -> str:
        """A sentence, where it finds the mask itself; empty where it takes the one it is given."""
        return "Rounds find the mask themselves" if self.rounds > 1 else ""

    def __call__(self, weight: Tensor, keep: Tensor, stats: ChannelStats) -> Tensor:
        """The weights under a mask, re-fitted."""
        return least_squares.least_squares(weight, keep, stats.gram, **self._options(stats))

    def find(
        self,
        weight: Tensor,
        stats: ChannelStats,
        mask_of: alternating.MaskOf,
        sparsity: float,
        pattern: Pattern | None,
    ) -> tuple[Tensor, Tensor]:
        """Mask and weights, found in turn; mask_of knows how many stay."""
        options = self._options(stats)
        fitted, keep = alternating.alternate(
            weight,
            stats.gram,
            mask_of,
            rounds=self.rounds,
            last_iters=options.pop("iters"),
            iters=self.round_iters,
            **options,
        )
        return keep, fitted

    def _options(self, stats: ChannelStats) -> dict[str, Any]:
        return {
            "iters": self.iters,
            "damping": self.damping,
            "shrink": self.shrink * stats.noise,
            "tolerance": self.tolerance,
        }


@dataclass(frozen=True)
class SparseGPT:
    """SparseGPT with the paper's defaults, as a baseline.

    select: the mask is chosen as the paper does, while the weights are updated, and the recipe's
    method has no say; otherwise only the weights under the method's mask are updated.
    """

    name: ClassVar[str] = "sparsegpt"
    needs: ClassVar[str] = GRAM
    select: bool = True
    damping: float = 0.01
    block: int = 128

    def __post_init__(self) -> None:
        check_positive(damping=self.damping, block=self.block)

    @property
    def finds_mask(self) -> str:
        """As `LeastSquares.finds_mask`."""
        return "sparsegpt finds the mask itself unless select is false" if self.select else ""

    def __call__(self, weight: Tensor, keep: Tensor, stats: ChannelStats) -> Tensor:
        """The weights under a mask, updated."""
        fitted, _ = least_squares.sparsegpt(
            weight, keep, stats.gram, damping=self.damping, block=self.block
        )
        return fitted

    def find(
        self,
        weight: Tensor,
        stats: ChannelStats,
        mask_of: alternating.MaskOf,
        sparsity: float,
        pattern: Pattern | None,
    ) -> tuple[Tensor, Tensor]:
        """Mask and weights, as the paper does; the recipe's method, mask_of, has no say."""
        fitted, keep = least_squares.sparsegpt(
            weight,
            None,
            stats.gram,
            sparsity=sparsity,
            pattern=pattern,
            damping=self.damping,
            block=self.block,
        )
        return keep, fitted


Update = LeastSquares | SparseGPT
UPDATES: dict[str, type[Any]] = {kind.name: kind for kind in (LeastSquares, SparseGPT)}


def chosen_update(options: Any) -> Update | None:
    """What a recipe's `update` says: nothing, a name, or a name with options."""
    return choose("update", UPDATES, options)


def to_dict(chosen: Update | None) -> dict[str, Any] | None:
    return None if chosen is None else written(chosen.name, chosen)
