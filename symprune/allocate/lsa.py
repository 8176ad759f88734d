"""How much attention and MLP of each block give, by the error they make without half of their
weights: LSA (Yang et al., ICLR 2026)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

from torch import Tensor

from symprune.allocate.budget import Layer, by_unit, check_spread, wanda_score
from symprune.allocate.by_error import sum_lowest
from symprune.stats import SQUARE, ChannelStats


@dataclass(frozen=True)
class LSA:
    """LSA (Yang et al., 2026): parts whose error without half of their weights is high give *more*;
    where it is low, few weights hold everything, and these must stay.

    A part is the attention or the MLP of a block (the paper's block-wise way), and its error the
    mean over its matrices of ||X(W~ - W)||^2, as it is, without half of each row's weights, those
    that make it least. The paper finds these greedily, with the Gram matrix. Here errors of single
    weights add up as if input channels were uncorrelated, as in Wanda's score, so that the sums of
    squares are enough: on SmolLM2-135M the parts have the same order (rank correlation 0.99).
    spread: the parts' sparsities cover a range of twice this, with the whole's as their mean.
    """

    name: ClassVar[str] = "lsa"
    needs: ClassVar[frozenset[str]] = frozenset({SQUARE})
    looks_at_outputs: ClassVar[bool] = False
    spread: float = 0.08

    def __post_init__(self) -> None:
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
        return replace(layer, error=half_error(score))

    def __call__(self, layers: list[Layer], sparsity: float) -> dict[str, int]:
        return lsa(layers, sparsity, self.spread)


def half_error(score: Tensor) -> float:
    """The squared error of a matrix that loses the lower half of every row's scores."""
    (error,) = sum_lowest(score.square(), [score.shape[1] // 2])
    return float(error)


def lsa(layers: list[Layer], sparsity: float, spread: float) -> dict[str, int]:
    """The parts' errors, stretched to 2 spread; a negative one turns the rule round."""
    errors = defaultdict[tuple[int, str], list[float]](list)
    for layer in layers:
        errors[_part(layer)].append(layer.error)
    means = {part: fmean(own) for part, own in errors.items()}
    return by_unit(layers, _part, means, sparsity, spread)


def _part(layer: Layer) -> tuple[int, str]:
    return layer.block, layer.part
