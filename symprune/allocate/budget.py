"""How much each layer gives: a whole number of weights for every matrix, with an exact total.

The sum over all matrices is what equal shares would remove. What a rule knows of a matrix is in its
`Layer`. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from symprune.errors import SympruneError

Unit = TypeVar("Unit", bound=Hashable)
HALVINGS = 60  # to the last bit of a double


@dataclass(frozen=True)
class Layer:
    """A matrix, and what the dense model says of it to the rule that divides the budget.

    outliers is for `owl`, count and price are for `by_error`: price[i] is the part of the layer's
    output that goes with the lowest `count[i]` scores of every row. error is for `lsa`, part
    (`attn` or `mlp`) as well.
    """

    name: str
    block: int
    rows: int
    columns: int
    removed: int
    outliers: int = 0
    count: list[int] = field(default_factory=list)
    price: list[float] = field(default_factory=list)
    part: str = "mlp"
    error: float = 0.0

    @property
    def size(self) -> int:
        return self.rows * self.columns


def check_spread(spread: float) -> None:
    if not 0 < spread < 1:
        raise SympruneError(f"spread must lie between 0 and 1, not {spread}.")


def wanda_score(weight: Tensor, input_norm: Tensor) -> Tensor:
    """|w| x"""
    return weight.float().abs() * input_norm


def equal_shares(layers: list[Layer]) -> dict[str, int]:
    return {layer.name: layer.removed for layer in layers}


def by_unit(
    layers: list[Layer],
    unit: Callable[[Layer], Unit],
    value: Mapping[Unit, float],
    sparsity: float,
    spread: float,
) -> dict[str, int]:
    """The unit of the highest value gets a sparsity higher by 2 spread than that of the lowest, the
    others lie between them in proportion, and the mean over all weights is the sparsity. A negative
    spread turns it round. Matrices of a unit are alike; with equal values all are."""
    low, high = min(value.values()), max(value.values())
    if high == low:
        return equal_shares(layers)
    more = {name: 2 * spread * (own - low) / (high - low) for name, own in value.items()}
    wanted = {layer.name: layer.size * (sparsity + more[unit(layer)]) for layer in layers}
    return divide_exactly(layers, wanted)  # and with the total, the mean


def divide_exactly(layers: list[Layer], wanted: dict[str, float]) -> dict[str, int]:
    """Whole numbers near what is wanted, inside every layer's size, with exactly the total.

    What is missing is taken from all layers in proportion to their size, so that the differences
    between their sparsities stay, and from the others where one has no more to give. Roundings go
    to the layers that lose most by them, the first among equals.
    """
    total = sum(layer.removed for layer in layers)
    shift = _find_shift(layers, wanted, total)
    ideal = [_clamp(layer, wanted[layer.name] + shift * layer.size) for layer in layers]
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


def _clamp(layer: Layer, count: float) -> float:
    return min(max(count, 0.0), float(layer.size))


def _find_shift(layers: list[Layer], wanted: dict[str, float], total: int) -> float:
    """By how much every sparsity has to change for the total, found by halving: it only rises."""

    def total_after(shift: float) -> float:
        return sum(_clamp(each, wanted[each.name] + shift * each.size) for each in layers)

    if total_after(0.0) == total:
        return 0.0
    furthest = 1 + max(abs(wanted[each.name]) / each.size for each in layers)
    low, high = -furthest, furthest
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if total_after(middle) < total else (low, middle)
    return high
