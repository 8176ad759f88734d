"""How much each layer gives: by its outliers (OWL), or by what its removal was measured to cost.

Both start from the dense model's Wanda scores |w| x and give every matrix a whole number of weights
to lose; the sum over all matrices is exactly what equal shares would remove. Knows tensors only.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from symprune import masks
from symprune.machine import host

LEVELS = 16
HALVINGS = 60  # to the last bit of a double


@dataclass(frozen=True)
class Layer:
    """A matrix, and what its dense scores say to the rule that divides the budget.

    outliers is for `owl`, count and price are for `by_error`: price[i] is the part of the layer's
    output that goes with the lowest `count[i]` scores of every row.
    """

    name: str
    block: int
    rows: int
    columns: int
    removed: int
    outliers: int = 0
    count: list[int] = field(default_factory=list)
    price: list[float] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.rows * self.columns


def outliers(score: Tensor, multiple: float) -> int:
    """How many scores are above a multiple of their mean."""
    return int((score > multiple * score.mean()).sum())


def prices(
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
    sums = lowest_sums(score.square(), count)
    whole, *lost = host.bring([output_norm.double().square().sum(), *sums])
    return count, [part / (whole or 1.0) for part in lost]


def lowest_sums(values: Tensor, counts: list[int]) -> list[Tensor]:
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


def owl(layers: list[Layer], sparsity: float, spread: float) -> dict[str, int]:
    """OWL (Yin et al., 2024): a block keeps the more, the larger its share of outliers.

    The shares are stretched to 2 spread and shifted, so that the mean over all weights is the
    sparsity; inside a block all matrices are alike.
    """
    blocks = sorted({layer.block for layer in layers})
    share = {}
    for block in blocks:
        own = [layer for layer in layers if layer.block == block]
        share[block] = sum(layer.outliers for layer in own) / sum(layer.size for layer in own)
    low, high = min(share.values()), max(share.values())
    if high == low:
        return {layer.name: layer.removed for layer in layers}
    kept = {block: 2 * spread * (share[block] - low) / (high - low) for block in blocks}
    wanted = {layer.name: layer.size * (sparsity - kept[layer.block]) for layer in layers}
    return _exact(layers, wanted)  # and with the total, the mean


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
    return _exact(layers, {name: float(count) for name, count in given.items()})


def _exact(layers: list[Layer], wanted: dict[str, float]) -> dict[str, int]:
    """Whole numbers near what is wanted, inside every layer's size, with exactly the total.

    What is missing is taken from all layers in proportion to their size, so that the differences
    between their sparsities stay, and from the others where one has no more to give. Roundings go
    to the layers that lose most by them, the first among equals.
    """
    total = sum(layer.removed for layer in layers)
    shift = _shift(layers, wanted, total)
    ideal = [_within(layer, wanted[layer.name] + shift * layer.size) for layer in layers]
    counts = [int(value) for value in ideal]
    missing = total - sum(counts)
    step = 1 if missing > 0 else -1
    by_rest = sorted(range(len(layers)), key=lambda i: step * (counts[i] - ideal[i]))
    while missing:
        for i in by_rest:
            if missing and 0 <= counts[i] + step <= layers[i].size:
                counts[i] += step
                missing -= step
    return {layer.name: count for layer, count in zip(layers, counts, strict=True)}


def _within(layer: Layer, count: float) -> float:
    return min(max(count, 0.0), float(layer.size))


def _shift(layers: list[Layer], wanted: dict[str, float], total: int) -> float:
    """By how much every sparsity has to change for the total, found by halving: it only rises."""

    def given(shift: float) -> float:
        return sum(_within(each, wanted[each.name] + shift * each.size) for each in layers)

    if given(0.0) == total:
        return 0.0
    furthest = 1 + max(abs(wanted[each.name]) / each.size for each in layers)
    low, high = -furthest, furthest
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if given(middle) < total else (low, middle)
    return high
