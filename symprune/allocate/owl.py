"""How much each block gives, by its outliers: OWL (Yin et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from symprune.allocate.budget import Layer, by_unit, check_spread, wanda_score
from symprune.stats import SQUARE, ChannelStats
from symprune.validation import check_positive


@dataclass(frozen=True)
class OWL:
    """OWL (Yin et al., 2024): blocks with more outliers give less.

    outlier: scores above so many times the mean are outliers. spread: the blocks' sparsities cover
    a range of twice this, with the whole's as their mean.
    """

    name: ClassVar[str] = "owl"
    needs: ClassVar[frozenset[str]] = frozenset({SQUARE})
    looks_at_outputs: ClassVar[bool] = False
    outlier: float = 5.0
    spread: float = 0.08

    def __post_init__(self) -> None:
        check_positive(outlier=self.outlier)
        check_spread(self.spread)

    def measure(
        self,
        layer: Layer,
        weight: Tensor,
        inputs: ChannelStats,
        outputs: ChannelStats | None,
        sparsity: float,
    ) -> Layer:
        score = wanda_score(weight, inputs.norm)
        return replace(layer, outliers=count_outliers(score, self.outlier))

    def __call__(self, layers: list[Layer], sparsity: float) -> dict[str, int]:
        return owl(layers, sparsity, self.spread)


def count_outliers(score: Tensor, multiple: float) -> int:
    """How many scores are above a multiple of their mean."""
    return int((score > multiple * score.mean()).sum())


def owl(layers: list[Layer], sparsity: float, spread: float) -> dict[str, int]:
    """OWL (Yin et al., 2024): a block keeps the more, the larger its share of outliers.

    The shares are stretched to 2 spread and shifted, so that the mean over all weights is the
    sparsity; inside a block all matrices are alike.
    """
    share = {}
    for block in sorted({layer.block for layer in layers}):
        own = [layer for layer in layers if layer.block == block]
        share[block] = sum(layer.outliers for layer in own) / sum(layer.size for layer in own)
    return by_unit(layers, lambda layer: layer.block, share, sparsity, -spread)
