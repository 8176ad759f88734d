"""Values on a grid: whole numbers of 8 or 4 bits with a sign, times a step for every block of 64.

A step is a bfloat16 and a whole number has 7 bits at most, so their product is exact in float32 and
what is on a grid crosses the wire without loss. Blocks are 64 places each; where most places are
zero, as behind a top-k, they are 64 values each, and the place where a block begins is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.wire.bits import (
    bytes_for,
    index_bits,
    pack_integers,
    read_varint,
    take,
    unpack_integers,
    varint_sizes,
    varints,
)

BLOCK = 64
LARGEST = {8: 127, 4: 7}
EXACT = (torch.float32, torch.float64)
REGULAR = 128  # in the byte that says how many bits: blocks of equal length


@dataclass(frozen=True)
class Grid:
    """The grids of C rows of d values each; `count` of the blocks of a row are its own."""

    bits: int
    steps: Tensor  # bfloat16 [C, most blocks]
    starts: Tensor  # int64 [C, most blocks]: the place where a block begins; d behind the last
    count: Tensor  # int64 [C]
    regular: Tensor  # bool [C]: blocks begin at 0, 64, 128, ...

    def row(self, number: int) -> Grid:
        one = slice(number, number + 1)
        parts = (self.steps, self.starts, self.count, self.regular)
        return Grid(self.bits, *(part[one] for part in parts))

    def spread(self, d: int) -> Tensor:
        """Every place's step, float32 `[C, d]`; 0 before the first block."""
        place = torch.arange(d).expand(len(self.steps), -1).contiguous()
        block = torch.searchsorted(self.starts, place, right=True) - 1
        steps = self.steps.float().gather(1, block.clamp_min(0))
        return torch.where(block >= 0, steps, 0.0)


def fit_grid(x: Tensor, bits: int) -> Grid:
    """The finest grid of every row of `x [C, d]` on which its largest values have a place."""
    C, d = x.shape
    nonzero = x != 0
    held = nonzero.sum(1)
    regular = 2 * held >= d
    place = torch.arange(d).expand(C, -1)
    rank = torch.where(regular.unsqueeze(1), place, nonzero.cumsum(1) - 1).clamp_min(0)
    block = rank // BLOCK
    count = torch.where(regular, -(-d // BLOCK), -(-held // BLOCK))
    most = max(1, int(count.max())) if C else 1
    size = x.abs().float()
    peak = size.new_zeros(C, most).scatter_reduce(1, block, size, "amax")
    first = (rank % BLOCK == 0) & (nonzero | regular.unsqueeze(1))
    starts = torch.full((C, most), d)
    row, at = first.nonzero(as_tuple=True)
    starts[row, block[row, at]] = at
    return Grid(bits, _round_up(peak / LARGEST[bits]), starts, count, regular)


def round_to(x: Tensor, grid: Grid, uniform: Tensor) -> Tensor:
    """`x [C, d]` on its grid: up or down at random, so that the mean is x."""
    steps = grid.spread(x.shape[1]).to(x.dtype)
    there = steps > 0
    place = torch.where(there, x.abs() / torch.where(there, steps, 1.0), 0.0)
    level = place.floor()
    level = level + (uniform < (place - level).double())
    return x.sign() * level.clamp_max(LARGEST[grid.bits]) * steps


def grid_sizes(grid: Grid, d: int, values: np.ndarray) -> np.ndarray:
    """Bytes of the grid and of so many whole numbers, for every row."""
    count = grid.count.cpu().numpy()
    where = varint_sizes(count) + bytes_for(count * index_bits(d))
    head = 1 + 2 * count + np.where(grid.regular.cpu().numpy(), 0, where)
    return head + bytes_for(values * grid.bits)


def encode_on_grid(values: Tensor, places: Tensor, d: int, grid: Grid) -> bytes:
    """The grid of one row and its values at these places."""
    count, regular = int(grid.count[0]), bool(grid.regular[0])
    starts, steps = (rows[0, :count].cpu() for rows in (grid.starts, grid.steps))
    head = bytes([grid.bits | REGULAR * regular])
    if not regular:
        head += varints(count) + pack_integers(starts.numpy(), index_bits(d))
    block = torch.searchsorted(starts, places, right=True) - 1
    step = steps.float()[block.clamp_min(0)].to(values.dtype)
    whole = torch.where(step > 0, values / torch.where(step > 0, step, 1.0), 0.0)
    codes = whole.round().to(torch.int8).numpy()
    return head + steps.view(torch.int16).numpy().tobytes() + _pack_codes(codes, grid.bits)


def decode_on_grid(
    data: bytes, at: int, places: Tensor, d: int, dtype: torch.dtype
) -> tuple[Tensor, int]:
    """The values at these places of a row of d, and where they end."""
    kind, at = take(data, at, 1)[0], at + 1
    bits, regular = kind & ~REGULAR, bool(kind & REGULAR)
    if bits not in LARGEST or dtype not in EXACT:
        raise SympruneError("A payload's values are on an unknown grid.")
    starts = torch.arange(0, d, BLOCK)
    if not regular:
        count, at = read_varint(data, at)
        if count > d:
            raise SympruneError(f"A payload claims {count} blocks of {d} values.")
        width = index_bits(d)
        packed = take(data, at, bytes_for(count * width))
        starts = torch.from_numpy(unpack_integers(packed, width, count))
        at += len(packed)
        if count and (int(starts[-1]) >= d or bool((starts.diff() <= 0).any())):
            raise SympruneError("A payload's blocks are out of range or out of order.")
    raw = take(data, at, 2 * len(starts))
    at += len(raw)
    steps = torch.from_numpy(np.frombuffer(raw, np.int16).copy()).view(torch.bfloat16).float()
    packed = take(data, at, bytes_for(len(places) * bits))
    codes = torch.from_numpy(_unpack_codes(packed, bits, len(places)))
    block = torch.searchsorted(starts, places, right=True) - 1
    if len(block) and int(block.min()) < 0:
        raise SympruneError("A payload has a value before its first block.")
    values = codes.to(dtype) * (steps[block] if len(steps) else steps.new_zeros(0)).to(dtype)
    return values, at + len(packed)


def merge_grids(grids: list[Grid], d: int) -> Grid:
    """The grids of several stacks of rows as those of one."""
    most = max(grid.steps.shape[1] for grid in grids)

    def widen(values: Tensor, fill: int) -> Tensor:
        return torch.nn.functional.pad(values, (0, most - values.shape[1]), value=fill)

    return Grid(
        grids[0].bits,
        torch.cat([widen(grid.steps, 0) for grid in grids]),
        torch.cat([widen(grid.starts, d) for grid in grids]),
        torch.cat([grid.count for grid in grids]),
        torch.cat([grid.regular for grid in grids]),
    )


def _round_up(step: Tensor) -> Tensor:
    """The next bfloat16 from above, of numbers that are not negative."""
    whole = step.contiguous().view(torch.int32)
    return ((whole + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _pack_codes(codes: np.ndarray, bits: int) -> bytes:
    """Two's complement; of two numbers with 4 bits the first is the lower half of a byte."""
    if bits == 8:
        return codes.tobytes()
    half = np.append(codes, np.zeros(len(codes) % 2, np.int8)).astype(np.uint8) & 15
    return (half[::2] | half[1::2] << 4).astype(np.uint8).tobytes()


def _unpack_codes(data: bytes, bits: int, count: int) -> np.ndarray:
    packed = np.frombuffer(data, np.uint8)
    if bits == 8:
        return packed.view(np.int8).copy()
    half = np.stack([packed & 15, packed >> 4], 1).ravel()[:count].astype(np.int8)
    return half - 16 * (half > 7)
