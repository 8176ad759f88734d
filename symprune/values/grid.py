"""A grid: the few values that weights which share a scale may have, and a matrix that is on it.

A weight is scale x level. GROUP columns of a row share a scale, in bfloat16. The levels of int8 are
-127 ... 127. Those of fewer bits are odd (-3, -1, 1, 3) or, with a zero, even (-4, -2, 0, 2). An
even grid has one level more on one side; its scales may be negative, so that a group's largest
weight is on that side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 64  # columns


@dataclass(frozen=True)
class Grid:
    """Levels from least to most, `step` apart; code 0 stands for `lowest`."""

    name: str
    bits: int
    least: int
    most: int
    step: int
    lowest: int

    @property
    def signs(self) -> tuple[int, ...]:
        """Of the scales."""
        return (1,) if self.most == -self.least else (1, -1)

    def nearest(self, ratio: Tensor) -> Tensor:
        """The level next to weight / scale, as a float. No gradient passes it: to train through it,
        hand the gradient on as if nothing had been rounded (straight-through)."""
        steps = torch.sub(ratio, self.least).mul_(1 / self.step).round_()
        last = (self.most - self.least) / self.step
        return steps.clamp_(0, last).mul_(self.step).add_(self.least)

    def codes(self, levels: Tensor) -> Tensor:
        """uint8"""
        return ((levels - self.lowest) / self.step).to(torch.uint8)

    def levels(self, codes: Tensor) -> Tensor:
        """fp32"""
        return codes.float().mul_(self.step).add_(self.lowest)


def _odd(bits: int) -> Grid:
    most = 2**bits - 1
    return Grid(f"int{bits}", bits, -most, most, 2, -most)


def _even(bits: int) -> Grid:
    return Grid(f"int{bits}z", bits, -(2**bits), 2**bits - 2, 2, -(2**bits))


GRIDS = {
    grid.name: grid
    for grid in (
        Grid("int8", 8, least=-127, most=127, step=1, lowest=-128),
        *(_odd(bits) for bits in (4, 3, 2)),
        *(_even(bits) for bits in (4, 3, 2)),
    )
}


@dataclass(frozen=True)
class OnGrid:
    """A matrix on a grid.

    codes: `[out, in]`, uint8, 0 where a weight is pruned. scales: `[out, groups]`, bfloat16; the
    last group of a row is what is left of it. Which weights are pruned is in the mask alone.
    """

    codes: Tensor
    scales: Tensor
    grid: Grid

    @classmethod
    def from_levels(
        cls, levels: Tensor, scales: Tensor, grid: Grid, keep: Tensor | None = None
    ) -> OnGrid:
        """From levels and scales as they are computed, in fp32."""
        codes = grid.codes(levels)
        if keep is not None:
            codes.masked_fill_(~keep, 0)
        return cls(codes, scales.to(torch.bfloat16), grid)

    def dense(self, keep: Tensor | None = None) -> Tensor:
        """The weights in fp32; zero where `keep` does not keep them."""
        weight = self.grid.levels(self.codes).mul_(spread(self.scales, self.codes.shape[1]))
        return weight if keep is None else weight.masked_fill_(~keep, 0)


def spread(scales: Tensor, columns: int) -> Tensor:
    """`[out, groups]` -> `[out, columns]`, fp32: the scale of each weight."""
    each = scales.float().unsqueeze(2).expand(-1, -1, GROUP)
    return each.reshape(len(scales), -1)[:, :columns]


def per_scale(scales: Tensor) -> Tensor:
    """1/scale, of either sign, and 0 where that would be infinite."""
    usable = scales.abs() >= torch.finfo(scales.dtype).tiny
    return torch.where(usable, 1 / scales, torch.zeros_like(scales))


def in_groups(matrix: Tensor) -> Tensor:
    """`[out, in]` -> `[out, groups, GROUP]`, the last group filled up with zeros."""
    filled = F.pad(matrix, (0, -matrix.shape[1] % GROUP))
    return filled.reshape(len(matrix), -1, GROUP)


def groups_of(columns: int) -> list[slice]:
    """The columns of each group."""
    return [slice(at, min(at + GROUP, columns)) for at in range(0, columns, GROUP)]


def fetch(values: dict[str, OnGrid]) -> dict[str, OnGrid]:
    """The same in main memory, brought there at once from each device."""
    found = dict(values)
    away: dict[torch.device, list[str]] = {}
    for name, value in values.items():
        if value.codes.device.type != "cpu":
            away.setdefault(value.codes.device, []).append(name)
    for names in away.values():
        parts = [t for name in names for t in (values[name].codes, values[name].scales)]
        flat = [part.flatten().view(torch.uint8) for part in parts]
        brought = iter(torch.cat(flat).cpu().split([len(part) for part in flat]))
        for name in names:
            value = values[name]
            codes = next(brought).clone().view(value.codes.shape)
            scales = next(brought).clone().view(torch.bfloat16).view(value.scales.shape)
            found[name] = OnGrid(codes, scales, value.grid)
    return found
