"""Gram matrices as messages: half of a symmetric matrix, exactly or as whole numbers of few bits.

Exactly is the pair of fp32 numbers a `GramSum` holds for an entry: where all clients round by one
scale, such sums have no order. As whole numbers an entry is counted in units of
|x_i| |x_j| / steps, where |x_i|^2 is the sum of squares over all clients, which they have added up
before. By Cauchy and Schwarz no sum of entries is larger than `steps` units, so sums modulo 2^bits
never overflow and can be masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.pruning.aggregate.packed_stats import Part
from symprune.fed.wire.payload import Expected
from symprune.stats import SQUARE, ChannelStats, Needs

BITS = {64: torch.int64, 32: torch.int32, 16: torch.int16}
EXACT = 64
WHOLE_BITS = 48  # that an exact entry, two fp32 numbers, has
MOST_CLIENTS = 4096  # whose roundings the units leave room for

Half = tuple[Tensor, Tensor]
"""The sums on and above a diagonal, row by row, and the rests of these."""


def entries(channels: int) -> int:
    return channels * (channels + 1) // 2


def channels_of(parts: Sequence[Part]) -> int:
    """The input channels of a block; an input that matrices share counts once."""
    return sum(part.channels for part in parts if part.gram)


def by_part(parts: Sequence[Part], vector: Tensor) -> list[Tensor]:
    """A number for each input channel of a block, part by part."""
    return list(vector.split([part.channels for part in parts if part.gram]))


def fields(parts: Sequence[Part], exact: bool, bits: int) -> Expected:
    """The Gram matrices of a reply."""
    sizes = [entries(part.channels) for part in parts if part.gram]
    kinds = ("gram", "rest") if exact else ("gram",)
    dtype = torch.float32 if exact else BITS[bits]
    return {f"{kind}{n}": (dtype, (size,)) for n, size in enumerate(sizes) for kind in kinds}


def first_scale(parts: Sequence[Part], inputs: Mapping[str, ChannelStats]) -> Tensor:
    """What the first sample says Gram matrices are to be rounded by; 0 where it did not come by."""
    scales = [torch.zeros(0, dtype=torch.float64)]
    for part in (part for part in parts if part.gram):
        stats = next((inputs[name] for name in part.names if name in inputs), None)
        scale = None if stats is None else stats.gram_scale
        empty = torch.zeros(part.channels, dtype=torch.float64)
        scales.append(empty if scale is None else scale.cpu())
    return torch.cat(scales)


def halves(parts: Sequence[Part], inputs: Mapping[str, ChannelStats]) -> list[Half]:
    """What was measured; zeros for an input no token reached."""
    found = []
    for part in (part for part in parts if part.gram):
        stats = next((inputs[name] for name in part.names if name in inputs), None)
        if stats is None:
            zeros = torch.zeros(entries(part.channels))
            found.append((zeros, zeros.clone()))
        else:
            sums, rests = stats.upper_gram()
            found.append((sums.cpu(), rests.cpu()))
    return found


def load(
    parts: Sequence[Part], totals: Sequence[Tensor], inputs: Mapping[str, ChannelStats]
) -> None:
    """Put sums, fp64, where the other statistics of the same inputs are."""
    for part, total in zip((part for part in parts if part.gram), totals, strict=True):
        stats = inputs.get(part.names[0])
        if stats is not None:
            sums = total.float()
            stats.load_upper_gram(sums, (total - sums).float())


def total(halves: Iterable[Half]) -> Tensor:
    """The sum, fp64: exact for entries that were rounded by one scale."""
    summed = torch.zeros(1, dtype=torch.float64)
    for sums, rests in halves:
        summed = summed + (sums.double() + rests.double())
    return summed


def to_units(half: Half, lengths: Tensor, bits: int, clients: int) -> Tensor:
    """A client's entries as whole numbers."""
    unit = _units(lengths, bits, clients)
    entry = half[0].double() + half[1].double()
    whole = torch.where(unit > 0, entry / unit.clamp(min=torch.finfo(unit.dtype).tiny), 0).round()
    if bool((whole.abs() > _steps(bits, clients) + clients).any()):
        raise SympruneError("A client was told of sums of squares that are smaller than its own.")
    return whole.to(BITS[bits])


def from_units(whole: Tensor, lengths: Tensor, bits: int, clients: int) -> Tensor:
    """A sum of such numbers as fp64 entries. Those on the diagonal are known exactly."""
    most = _steps(bits, clients) * (1 + 2.0**-7) + clients  # squares are rounded in another way
    if bool((whole.double().abs() > most).any()):
        raise SympruneError("The clients' sum of Gram matrices has entries that none can have.")
    entry = in_units(whole, lengths, bits, clients)
    row = torch.arange(len(lengths), 0, -1)
    entry[row.cumsum(0) - row] = lengths.double().square()
    return entry


def in_units(whole: Tensor, lengths: Tensor, bits: int, clients: int) -> Tensor:
    """What such numbers mean, one client's or a sum."""
    return whole.double() * _units(lengths, bits, clients)


def _steps(bits: int, clients: int) -> float:
    """The most units an entry has, with room for the roundings of every client's squares."""
    if bits == EXACT:
        return 2.0**WHOLE_BITS
    return 2.0 ** (bits - 1) - 2.0 ** (bits - 8) - clients


def _units(lengths: Tensor, bits: int, clients: int) -> Tensor:
    return products(lengths) / _steps(bits, clients)


def products(lengths: Tensor) -> Tensor:
    """|x_i| |x_j| on and above the diagonal, row by row."""
    lengths = lengths.double()
    rows = [lengths[row] * lengths[row:] for row in range(len(lengths))]
    return torch.cat([lengths[:0], *rows])


def check_bits(bits: int, clients: int = 1) -> None:
    if bits not in BITS:
        raise SympruneError(f"A Gram matrix is sent in 64, 32 or 16 bits a number, not {bits}.")
    if bits < EXACT and clients > MOST_CLIENTS:
        raise SympruneError(f"{clients} clients need 64 bits for a number of a Gram matrix.")


def with_squares(needs: Needs, wanted: bool) -> Needs:
    """Gram matrices in units of the channels' lengths need these first."""
    return replace(needs, inputs=needs.inputs | {SQUARE}) if needs.gram and wanted else needs


def of_channels(needs: Needs) -> Needs:
    """The cheapest that tells which matrices share an input, and how long their channels are."""
    squares = frozenset({SQUARE})
    sides = (squares if side else frozenset[str]() for side in (needs.inputs, needs.outputs))
    inputs, outputs = sides
    return replace(needs, inputs=inputs, outputs=outputs)
