"""Mask + statistics -> re-fitted kept weights: masked least squares.

Minimises ||X(W~ - W)||_F over the kept weights with G = X^T X; the pruned ones stay zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from symprune.masks import Pattern
from symprune.stats import GRAM, SHRINK, ChannelStats
from symprune.update.alternating import MaskOf, alternate
from symprune.update.damped_gram import DampedGram
from symprune.validation import check_not_negative, check_positive


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
        return least_squares(weight, keep, stats.gram, **self._options(stats))

    def find(
        self,
        weight: Tensor,
        stats: ChannelStats,
        mask_of: MaskOf,
        sparsity: float,
        pattern: Pattern | None,
    ) -> tuple[Tensor, Tensor]:
        """Mask and weights, found in turn; mask_of knows how many stay."""
        options = self._options(stats)
        fitted, keep = alternate(
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


def least_squares(
    weight: Tensor,
    keep: Tensor,
    gram: Tensor,
    *,
    iters: int = 20,
    damping: float = 0.01,
    shrink: float = 0.0,
    tolerance: float = 1e-3,
) -> Tensor:
    """Kept weights re-fitted to the dense layer's outputs, by preconditioned conjugate gradients.

    Minimises sum over rows of (w~ - w)^T (G + R) (w~ - w), with R from `DampedGram`: directions the
    calibration data does not show stay at the dense weights. An iteration is one product with G.
    Stops after `iters`, or when every row's residual is below `tolerance` times what it was.
    """
    weight = weight.float()
    damped_gram = DampedGram.from_gram(gram.to(weight.device), damping, shrink)
    fitted = weight * keep
    damped_gram.descend(weight, fitted, keep, iters, tolerance)
    return fitted
