"""Packed matrices that are not in main memory: expanded where they are, with torch's operations.

The same functions as `multiply.py` for blobs on an accelerator. A kernel of that device's own can
take the place of this file. What reads the header or follows the tiles makes the host wait, once
for every blob; afterwards nothing does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from symprune.runtime import semi_structured
from symprune.runtime.blob import BITS, FLOATS, HEADER, Layout, check, describe
from symprune.runtime.tiles import GROUP, MASKS, PANEL, SCALES

AT_ONCE = 2**21  # weights expanded at a time


@dataclass
class _Tiles:
    """Where in a blob every tile `[panel, group]` begins; `ready` is a form of the matrix that the
    device multiplies from directly, if it has one."""

    state: tuple[int, int]
    layout: Layout
    starts: Tensor
    ready: Tensor | None = None


_KNOWN = WeakIdKeyDictionary()


def multiply(blob: Tensor, x: Tensor, *, piece: int = 0, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for `x` `[..., columns]`, in the dtype of `x`: `[..., rows]`."""
    tiles = _tiles(blob)
    given = None if bias is None else bias.to(x.dtype)
    if tiles.ready is not None and tiles.ready.dtype == x.dtype:
        return F.linear(x, tiles.ready, given)
    parts = [x @ rows.T for rows in _expand(blob, tiles, 0, tiles.layout.rows, x.dtype, piece)]
    found = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return found if given is None else found + given


def checked(blob: Tensor) -> Layout:
    """What a blob holds; the first time it is seen, every tile of it is checked."""
    return _tiles(blob).layout


def expand_rows(blob: Tensor, first: int, count: int, dtype: torch.dtype, piece: int = 0) -> Tensor:
    """Rows `first` to `first + count` of a matrix, dense: `[count, columns]`."""
    parts = list(_expand(blob, _tiles(blob), first, count, dtype, piece))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gather_rows(blob: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows by their numbers, an embedding's look-up: `[..., columns]` for indices `[...]`."""
    tiles = _tiles(blob)
    rows = indices.reshape(-1).long()
    step = max(AT_ONCE // (tiles.layout.groups * GROUP), 1)
    parts = [_decode(blob, tiles, part // PANEL, part % PANEL, dtype) for part in rows.split(step)]
    return torch.cat(parts).view(*indices.shape, tiles.layout.columns)


def _tiles(blob: Tensor) -> _Tiles:
    """Found once for a blob, as long as it stays where it is."""
    state = (blob.data_ptr(), 0 if blob.is_inference() else blob._version)
    known = _KNOWN.get(blob)
    if known is None or known.state != state:
        here = blob.detach().cpu()
        check(here)
        layout = describe(here)
        known = _KNOWN[blob] = _Tiles(state, layout, _find_tiles(blob, layout))
        if semi_structured.fits(layout, blob.device):
            known.ready = semi_structured.convert(
                expand_rows(blob, 0, layout.rows, FLOATS[layout.kind])
            )
    return known


def _find_tiles(blob: Tensor, layout: Layout) -> Tensor:
    """One group of columns after the other, all panels at once; without masks tiles are alike."""
    tiling = layout.tiling
    # A blob out of a file may begin at any byte; a copy begins where eight bytes can be read.
    offsets = blob[HEADER.size : layout.begin].clone().view(torch.int64)
    here = offsets[:-1] + layout.begin
    if not tiling.masked:
        steps = torch.arange(layout.groups, device=blob.device) * tiling.least
        return _small(here[:, None] + steps, layout)
    places = torch.arange(8, device=blob.device)
    ones = ((torch.arange(256, device=blob.device)[:, None] >> places) & 1).sum(1)
    masks = torch.arange(MASKS, device=blob.device)
    starts = []
    for _ in range(layout.groups):
        starts.append(here)
        counts = ones[blob[here[:, None] + masks].long()].view(-1, PANEL, 8).sum(2)
        here = here + tiling.head + ((counts * tiling.bits + 7) // 8).sum(1)
    return _small(torch.stack(starts, 1), layout)


def _small(starts: Tensor, layout: Layout) -> Tensor:
    return starts.int() if layout.size < 2**31 else starts


def _expand(
    blob: Tensor, tiles: _Tiles, first: int, count: int, dtype: torch.dtype, piece: int
) -> Iterator[Tensor]:
    """Rows `first` to `first + count` of a matrix, some after the other."""
    layout = tiles.layout
    at_once = max(AT_ONCE // (layout.groups * GROUP * PANEL), 1) * PANEL
    base = piece * layout.panels
    for begin in range(first - first % PANEL, first + count, at_once):
        end = min(begin + at_once, first + count)
        panels = torch.arange(begin // PANEL, -(-end // PANEL), device=blob.device)
        rows = _decode(blob, tiles, base + panels, None, dtype)
        yield rows[max(first - begin, 0) : end - begin]


def _decode(
    blob: Tensor, tiles: _Tiles, panels: Tensor, row: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The rows of some panels, or one `row` of each."""
    layout = tiles.layout
    tiling, device = layout.tiling, blob.device
    starts = tiles.starts[panels].long()
    columns = torch.arange(GROUP, device=device)
    places, lengths, keep = columns, torch.full((), tiling.run, device=device), None
    if tiling.masked:
        masks = blob[starts[..., None] + torch.arange(MASKS, device=device)].int()
        bits = (masks[..., None] >> torch.arange(8, device=device)) & 1
        bits = bits.view(*starts.shape, PANEL, GROUP)
        lengths = (bits.sum(-1) * tiling.bits + 7) // 8
        bits = _pick(bits, row)
        keep, places = bits.bool(), (bits.cumsum(-1) - 1).clamp(min=0)
    lengths = lengths.expand(*starts.shape, PANEL)
    runs = starts[..., None] + tiling.head + lengths.cumsum(-1) - lengths
    words = _words(blob, _pick(runs, row)[..., None], places, tiling.bits)
    if tiling.quantised:
        where = starts[..., None] + MASKS * tiling.masked + torch.arange(SCALES, device=device)
        scales = _pick(blob[where].view(torch.bfloat16), row).float()
        values = layout.grid.levels(words) * scales[..., None]
    else:
        values = words.view(FLOATS[layout.kind])
    if keep is not None:
        values = values.masked_fill(~keep, 0)
    whole = values.to(dtype).transpose(1, 2).flatten(2).flatten(0, 1)
    return whole[:, : layout.columns]


def _words(blob: Tensor, runs: Tensor, places: Tensor, bits: int) -> Tensor:
    """The value at each place of its run: a code, or the bytes of a float as an integer."""
    if bits < 8:
        begin = places * bits
        where = runs + (begin >> 3)
        two = blob[where].int() | (blob[where + 1].int() << 8)
        return (two >> (begin & 7).int()) & (2**bits - 1)
    where = runs + places * (bits // 8)
    if bits == BITS["int8"]:
        return blob[where].int()
    bytes_of_each = torch.arange(bits // 8, device=blob.device)
    whole = torch.int16 if bits == 16 else torch.int32
    return blob[where[..., None] + bytes_of_each].view(whole).squeeze(-1)


def _pick(each: Tensor, row: Tensor | None) -> Tensor:
    """Of `[panel, group, row, ...]` the row asked for, or all."""
    if row is None:
        return each
    index = row.view(-1, *[1] * (each.dim() - 1)).expand(-1, each.shape[1], 1, *each.shape[3:])
    return each.gather(2, index)
