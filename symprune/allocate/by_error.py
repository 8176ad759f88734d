"""How much each matrix gives, by what its removal was measured to cost."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from symprune import masks
from symprune.allocate.budget import Layer, check_spread, divide_exactly, wanda_score
from symprune.machine import host
from symprune.stats import SQUARE, ChannelStats

LEVELS = 16


@dataclass(frozen=True)
class ByError:
    """The budget is spent where the measured error per removed weight is smallest.

    spread: no matrix's sparsity is further than this from the whole's.
    """

    name: ClassVar[str] = "error"
    needs: ClassVar[frozenset[str]] = frozenset({SQUARE})
    looks_at_outputs: ClassVar[bool] = True
    spread: float = 0.1

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
        assert outputs is not None
        score = wanda_score(weight, inputs.norm)
        count, price = price_levels(score, outputs.norm, sparsity, self.spread)
        return replace(layer, count=count, price=price)

    def __call__(self, layers: list[Layer], sparsity: float) -> dict[str, int]:
        return by_error(layers)


def price_levels(
    score: Tensor, output_norm: Tensor, sparsity: float, spread: float
) -> tuple[list[int], list[float]]:
    """What a row may lose, at most `spread` away from the sparsity, and what part of the layer's
    output (squared, relative) goes with it.

    Errors of single weights add up as if input channels were uncorrelated, as in Wanda's score.
    """
    columns = score.shape[1]
    low, high = max(0.0, sparsity - spread), min(1.0, sparsity + spread)
    bounds = torch.linspace(low * columns, high * columns, LEVELS + 1, dtype=torch.float64)
    count = sorted({int(bound) for bound in bounds})
    sums = sum_lowest(score.square(), count)
    whole, *lost = host.bring([output_norm.double().square().sum(), *sums])
    return count, [part / (whole or 1.0) for part in lost]


def sum_lowest(values: Tensor, counts: list[int]) -> list[Tensor]:
    """For each count, the sum over rows of the lowest so many values of a row."""
    sums = []
    for count in counts:
        if count in (0, values.shape[1]):
            sums.append(values[:, :count].sum(dtype=torch.float64))
            continue
        edge = masks.kth_smallest(values, count).unsqueeze(1)
        below = values < edge
        # of the values at the edge itself only as many as are missing
        missing = count - masks.count_true(below)
        at_edge = (edge.squeeze(1).double() * missing.to(edge.device)).sum()
        sums.append((values * below).sum(dtype=torch.float64) + at_edge)
    return sums


def by_error(layers: list[Layer]) -> dict[str, int]:
    """Step by step, the next weights go where they cost the least part of their layer's output.

    A row's lowest scores go first, so a layer's price per weight only rises: taking the cheapest
    step each time gives the least total for the budget.
    """
    budget = sum(layer.removed for layer in layers)
    given = {layer.name: layer.rows * layer.count[0] for layer in layers}
    budget -= sum(given.values())
    queue: list[tuple[float, int, int]] = []

    def offer(place: int, step: int) -> None:
        layer = layers[place]
        if step + 1 < len(layer.count):
            weights = layer.rows * (layer.count[step + 1] - layer.count[step])
            price = (layer.price[step + 1] - layer.price[step]) / weights
            heapq.heappush(queue, (price, place, step))

    for place in range(len(layers)):
        offer(place, 0)
    while budget > 0 and queue:
        _, place, step = heapq.heappop(queue)
        layer = layers[place]
        weights = min(budget, layer.rows * (layer.count[step + 1] - layer.count[step]))
        given[layer.name] += weights
        budget -= weights
        offer(place, step + 1)
    return divide_exactly(layers, {name: float(count) for name, count in given.items()})
