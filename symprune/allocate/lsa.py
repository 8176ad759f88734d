"""How much attention and MLP of each block give, by how little of their weights would do: LSA (Yang
et al., 2026)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

import torch
from torch import Tensor

from symprune.allocate.budget import Layer, by_unit, check_spread
from symprune.stats import GRAM, SQUARE, ChannelStats

TOGETHER = 32


@dataclass(frozen=True)
class LSA:
    """LSA (Yang et al., 2026): the parts that cannot do without half of their weights give *more*:
    where the error is small, few weights hold everything, and these must stay.

    A part is the attention or the MLP of a block. Its error is the mean over its matrices of
    ||X(W~ - W)||^2 without half of every row's weights, those with which it is least. spread: the
    parts' sparsities cover a range of twice this, with the whole's as their mean.
    """

    name: ClassVar[str] = "lsa"
    needs: ClassVar[frozenset[str]] = frozenset({SQUARE, GRAM})
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
        error = least_error(weight.float(), inputs.gram.to(weight.device))
        return replace(layer, error=float(error) / max(inputs.samples, 1))

    def __call__(self, layers: list[Layer], sparsity: float) -> dict[str, int]:
        return lsa(layers, sparsity, self.spread)


def lsa(layers: list[Layer], sparsity: float, spread: float) -> dict[str, int]:
    """The errors of the parts, stretched to 2 spread; a negative one turns the rule round."""
    errors = defaultdict[tuple[int, str], list[float]](list)
    for layer in layers:
        errors[_part(layer)].append(layer.error)
    means = {part: fmean(own) for part, own in errors.items()}
    return by_unit(layers, _part, means, sparsity, spread)


def _part(layer: Layer) -> tuple[int, str]:
    return layer.block, layer.part


def least_error(weight: Tensor, gram: Tensor) -> Tensor:
    """||X(W~ - W)||^2 where each row has lost half of its weights, as few as the error asks for.

    Greedily, as in the paper's Algorithm 1: of every group of columns the weight goes whose loss
    adds least to the error of those that went before, until half of the group are gone.
    """
    more = weight.square() * gram.diagonal()
    total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for start in range(0, weight.shape[1], TOGETHER):
        here, later = slice(start, start + TOGETHER), slice(start + TOGETHER, None)
        own, adds, among = weight[:, here], more[:, here], gram[here, here]
        lost = torch.zeros_like(own)
        for _ in range(own.shape[1] // 2):
            least, place = adds.min(1, keepdim=True)
            total += least.sum(dtype=torch.float64)
            gone = own.gather(1, place)
            lost.scatter_(1, place, gone)
            adds.addcmul_(gone * own, among[place.squeeze(1)], value=2)
            adds.scatter_(1, place, torch.inf)
        more[:, later].addcmul_(weight[:, later], lost @ gram[here, later], value=2)
    return total
