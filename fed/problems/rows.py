"""The rows of several clients as one stack, padded to one shape with row weights.

The stack is as wide as its largest client has rows, so clients of about the same size are computed
together. How many rows a client is computed with follows from how many it has (and from the width
of the whole problem), never from who else is in the stack: it gets the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from symprune.errors import SympruneError

WEIGHTINGS = ("mean", "size", "sum")
STEPS = 8  # sizes from one power of two to the next: at most an eighth of padding


@dataclass(frozen=True)
class Rows:
    """Rows of C clients, padded: `x [C, m, ...]` numbers or tokens, `y [C, m, ...]`, `weights
    [C, m]` (0 on padding), whose dtype is the model's. `seeds [C]` are for what training draws."""

    x: Tensor
    y: Tensor
    weights: Tensor
    seeds: Tensor | None = None

    def __getitem__(self, index: Any) -> Rows:
        clients = index[0] if isinstance(index, tuple) else index
        seeds = None if self.seeds is None else self.seeds[clients]
        return Rows(self.x[index], self.y[index], self.weights[index], seeds)

    @cached_property
    def buckets(self) -> list[tuple[Tensor | slice, Rows]]:
        """Clients of about the same size, by their places, and their rows with little padding."""
        found = find_buckets(self.weights)
        return [(each.places, self[each.places, : each.width]) for each in found]

    def on(self, device: str | torch.device) -> Rows:
        seeds = None if self.seeds is None else self.seeds.to(device)
        return Rows(self.x.to(device), self.y.to(device), self.weights.to(device), seeds)

    def to(self, dtype: torch.dtype) -> Rows:
        x = self.x.to(dtype) if self.x.is_floating_point() else self.x
        return Rows(x, self.y.to(dtype), self.weights.to(dtype), self.seeds)


def stack_rows(parts: Sequence[tuple[Tensor, Tensor]], weighting: str = "mean") -> Rows:
    """Clients' (x, y) stacked and padded; whole numbers in x, such as tokens, stay whole. Row
    weights: `mean` 1/m_i; `size` n/N, so that `(1/n) sum f_i` is the mean over all N rows; `sum`
    1."""
    if weighting not in WEIGHTINGS:
        raise SympruneError(
            f"Unknown weighting {weighting!r}; choose from {', '.join(WEIGHTINGS)}."
        )
    counts = [len(y) for _, y in parts]
    if min(counts) == 0:
        raise SympruneError(f"Client {counts.index(0)} has no rows.")
    most, total = max(counts), sum(counts)
    x = parts[0][0].new_zeros(len(parts), most, *parts[0][0].shape[1:])
    dtype = next((t.dtype for t in parts[0] if t.is_floating_point()), torch.float32)
    y = x.new_zeros(len(parts), most, *parts[0][1].shape[1:], dtype=dtype)
    weights = x.new_zeros(len(parts), most, dtype=dtype)
    for i, (rows, targets) in enumerate(parts):
        m = counts[i]
        x[i, :m], y[i, :m] = rows, targets
        weights[i, :m] = {"mean": 1 / m, "size": len(parts) / total, "sum": 1.0}[weighting]
    return Rows(x, y, weights)


@dataclass(frozen=True)
class Bucket:
    """Clients at some places of a stack, and how many rows each is computed with."""

    places: Tensor | slice
    width: int


def width_for(used: Tensor, width: int) -> Tensor:
    """Rows that a client with `used` rows is computed with: the next of a few sizes between two
    powers of two, at most all there are."""
    power = torch.floor(torch.log2(used.clamp_min(1).double())).long()
    step = (2**power // STEPS).clamp_min(1)
    return ((used + step - 1) // step * step).clamp_max(width)


def find_buckets(weights: Tensor) -> list[Bucket]:
    """The buckets of a stack with row weights `[C, m]`. Who has no row is in none of them."""
    width, counted = weights.shape[1], weights != 0
    if bool(counted.all()):
        return [Bucket(slice(None), width)]
    place = torch.arange(1, width + 1, device=weights.device)
    widths = width_for((counted * place).amax(1).cpu(), width)
    sizes = widths.unique().tolist()
    if len(sizes) == 1 and sizes[0]:
        return [Bucket(slice(None), sizes[0])]
    return [Bucket((widths == size).nonzero().squeeze(1), size) for size in sizes if size]
