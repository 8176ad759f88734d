"""A grid: the few values that weights which share a scale may have, and a matrix that is on it.

A weight is scale x level. GROUP columns of a row share a scale, in bfloat16. The levels of int8 are
-127 ... 127, those of b < 8 bits -2^(b-1) ... 2^(b-1) - 1. There a scale may be negative, so that a
group's largest weight is on the side that has one level more. One of the levels is zero, under a
mask as well: what is kept in a group beside one very large weight may be nothing in comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 64  # columns


@dataclass(frozen=True)
class Grid:
    """Levels from least to most; code 0 stands for `lowest`."""

    name: str
    bits: int
    least: int
    most: int

    @property
    def lowest(self) -> int:
        return -(2 ** (self.bits - 1))

    @property
    def signs(self) -> tuple[int, ...]:
        """Of the scales."""
        return (1,) if self.most == -self.least else (1, -1)

    def nearest(self, ratio: Tensor) -> Tensor:
        """The level next to weight / scale, as a float. No gradient passes it: to train through it,
        hand the gradient on as if nothing had been rounded (straight-through)."""
        return ratio.round().clamp_(self.least, self.most)

    def codes(self, levels: Tensor) -> Tensor:
        """uint8"""
        return (levels - self.lowest).to(torch.uint8)

    def levels(self, codes: Tensor) -> Tensor:
        """fp32"""
        return codes.float().add_(self.lowest)


GRIDS = {
    grid.name: grid
    for grid in (
        Grid("int8", 8, -127, 127),
        Grid("int4", 4, -8, 7),
        Grid("int3", 3, -4, 3),
        Grid("int2", 2, -2, 1),
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
