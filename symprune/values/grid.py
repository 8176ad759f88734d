"""A grid: the few values that weights which share a scale may have, and a matrix that is on it.

A weight is scale x level. GROUP columns of a row share a scale, in bfloat16. The levels of int8 are
-127 ... 127. Of b bits there are 2^b levels, with n = 2^(b-1):

- int4, int3 and int2 have -n ... -1 and 1 ... n: zero is what a mask is for, and what it leaves is
  not small;
- int4z, int3z and int2z have -n ... n - 1, zero among them. Their scales may be negative, so that
  a group's largest weight is on the side that has one more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 64  # columns


@dataclass(frozen=True)
class Grid:
    """Levels from least to most, zero among them or not; code 0 stands for `lowest`."""

    name: str
    bits: int
    least: int
    most: int
    lowest: int
    zero: bool = True

    @property
    def signs(self) -> tuple[int, ...]:
        """Of the scales."""
        return (1,) if self.most == -self.least else (1, -1)

    def nearest(self, ratio: Tensor) -> Tensor:
        """The level next to weight / scale, as a float. No gradient passes it: to train through it,
        hand the gradient on as if nothing had been rounded (straight-through)."""
        if self.zero:
            return ratio.round().clamp_(self.least, self.most)
        return ratio.abs().round_().clamp_(1, self.most).copysign_(ratio)

    def codes(self, levels: Tensor) -> Tensor:
        """uint8"""
        skipped = 0 if self.zero else (levels > 0).to(levels.dtype)
        return (levels - self.lowest - skipped).to(torch.uint8)

    def levels(self, codes: Tensor) -> Tensor:
        """fp32"""
        levels = codes.float().add_(self.lowest)
        return levels if self.zero else levels.add_(levels >= 0)


def _without_zero(bits: int) -> Grid:
    half = 2 ** (bits - 1)
    return Grid(f"int{bits}", bits, -half, half, -half, zero=False)


def _with_zero(bits: int) -> Grid:
    half = 2 ** (bits - 1)
    return Grid(f"int{bits}z", bits, -half, half - 1, -half)


GRIDS = {
    grid.name: grid
    for grid in (
        Grid("int8", 8, least=-127, most=127, lowest=-128),
        *(_without_zero(bits) for bits in (4, 3, 2)),
        *(_with_zero(bits) for bits in (4, 3, 2)),
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
