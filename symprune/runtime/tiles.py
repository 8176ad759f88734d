"""The tiles of a packed matrix, in numpy: the reference every kernel is tested against.

A tile is 8 rows of one group of 64 columns: its masks if there are any, its scales if the values
are codes, then for each row the kept values, bit-packed. 8 rows' tiles in order are a panel, one
forward stream. Knows arrays only; `blob.py` puts a header in front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

GROUP = 64  # columns that share a scale and a mask word
PANEL = 8  # rows that share a stream
MASKS = 8 * PANEL  # bytes of a tile's masks
SCALES = 2 * PANEL  # bytes of a tile's scales
COLUMNS = np.arange(GROUP)


@dataclass(frozen=True)
class Tiling:
    """How a tile is laid out: bits of a value, whether it is a code with a scale, the masks."""

    bits: int
    quantised: bool
    masked: bool

    @property
    def head(self) -> int:
        """Bytes in front of the values."""
        return MASKS * self.masked + SCALES * self.quantised

    @property
    def run(self) -> int:
        """Bytes of a row's values when all are kept."""
        return GROUP * self.bits // 8

    @property
    def least(self) -> int:
        """The fewest bytes a tile can have."""
        return self.head + (0 if self.masked else PANEL * self.run)

    @property
    def word(self) -> np.dtype:
        """The unsigned integer that holds one value."""
        return np.dtype(f"<u{max(self.bits // 8, 1)}")


class Rows(NamedTuple):
    """Some rows: codes or the bits of floats `[rows, columns]`, the bits of the bfloat16 scales
    `[rows, groups]`, the keep-mask."""

    words: np.ndarray
    scales: np.ndarray | None
    keep: np.ndarray | None

    def cut(self, rows: int, columns: int) -> Rows:
        """Without what fills them up to whole panels and groups."""
        keep = None if self.keep is None else self.keep[:rows, :columns]
        scales = None if self.scales is None else self.scales[:rows]
        return Rows(self.words[:rows, :columns], scales, keep)


def pack_panels(rows: Rows, tiling: Tiling) -> tuple[np.ndarray, np.ndarray]:
    """(the stream of whole panels, the bytes of each panel)."""
    words, scales, keep = rows
    panels, groups = words.shape[0] // PANEL, words.shape[1] // GROUP
    words = _to_tiles(words, panels, groups)
    tiles = len(words)
    parts, valid = [], []
    if keep is None:
        counts = np.full((tiles, PANEL), GROUP)
    else:
        kept = _to_tiles(keep, panels, groups)
        counts = np.count_nonzero(kept, axis=-1)
        first = np.zeros_like(words)
        first[counts[..., None] > COLUMNS] = words[kept]
        words = first
        parts.append(np.packbits(kept, axis=-1, bitorder="little").reshape(tiles, MASKS))
        valid.append(np.ones((tiles, MASKS), bool))
    if scales is not None:
        turned = scales.reshape(panels, PANEL, groups).transpose(0, 2, 1)
        parts.append(np.ascontiguousarray(turned, "<u2").view(np.uint8).reshape(tiles, SCALES))
        valid.append(np.ones((tiles, SCALES), bool))
    parts.append(_pack_runs(words, tiling).reshape(tiles, PANEL * tiling.run))
    inside = np.arange(tiling.run) < _run_bytes(counts, tiling)[..., None]
    valid.append(inside.reshape(tiles, PANEL * tiling.run))
    whole = np.concatenate(valid, axis=1)
    sizes = np.count_nonzero(whole, axis=1).reshape(panels, groups).sum(1)
    return np.concatenate(parts, axis=1)[whole], sizes


def find_tiles(
    data: np.ndarray, begins: np.ndarray, ends: np.ndarray, groups: int, tiling: Tiling
) -> np.ndarray:
    """Where in `data` every tile `[panel, group]` begins; `ValueError` unless each panel's tiles
    fill it from its begin to its end, so that nothing outside is read afterwards."""
    if np.any(begins < 0) or np.any(ends > len(data)) or np.any(ends - begins < 0):
        raise ValueError("a panel lies outside the data")
    if not tiling.masked:
        if np.any(ends - begins != groups * tiling.least):
            raise ValueError("a panel has another size than its tiles")
        return begins[:, None] + np.arange(groups) * tiling.least
    starts = np.empty((len(begins), groups), np.int64)
    here = begins.astype(np.int64)
    for group in range(groups):
        starts[:, group] = here
        if np.any(here + tiling.head > ends):
            raise ValueError("a panel ends inside a tile")
        kept = np.bitwise_count(data[here[:, None] + np.arange(MASKS)])
        counts = kept.reshape(-1, PANEL, 8).sum(2, dtype=np.int64)
        here = here + tiling.head + _run_bytes(counts, tiling).sum(1)
    if np.any(here != ends):
        raise ValueError("a panel has another size than its tiles")
    return starts


def unpack_panels(data: np.ndarray, starts: np.ndarray, tiling: Tiling) -> Rows:
    """The rows that `pack_panels` was given; a pruned place has word 0."""
    panels, groups = starts.shape
    starts = starts.reshape(-1)
    keep = scales = None
    counts = np.full((len(starts), PANEL), GROUP)
    if tiling.masked:
        masks = data[starts[:, None] + np.arange(MASKS)].reshape(-1, PANEL, 8)
        kept = np.unpackbits(masks, axis=-1, bitorder="little").view(bool)
        counts = np.count_nonzero(kept, axis=-1)
        keep = _to_rows(kept, panels, groups)
    if tiling.quantised:
        where = starts[:, None] + MASKS * tiling.masked + np.arange(SCALES)
        turned = data[where].view("<u2").reshape(panels, groups, PANEL)
        scales = turned.transpose(0, 2, 1).reshape(panels * PANEL, groups)
    lengths = _run_bytes(counts, tiling)
    runs = starts[:, None] + tiling.head + np.cumsum(lengths, axis=1) - lengths
    # Past the end of a run the bytes are another row's, or the last of the data: never used.
    where = np.minimum(runs[..., None] + np.arange(tiling.run), len(data) - 1)
    words = _unpack_runs(data[where], tiling)
    if tiling.masked:
        placed = np.zeros_like(words)
        placed[kept] = words[counts[..., None] > COLUMNS]
        words = placed
    return Rows(_to_rows(words, panels, groups), scales, keep)


def _run_bytes(counts: np.ndarray, tiling: Tiling) -> np.ndarray:
    """Bytes of runs of so many values."""
    return (counts * tiling.bits + 7) // 8


def _pack_runs(words: np.ndarray, tiling: Tiling) -> np.ndarray:
    """`[tile, row, 64]` -> `[tile, row, bytes]`, the lowest bits first."""
    if tiling.bits >= 8:
        return np.ascontiguousarray(words, tiling.word).view(np.uint8)
    spread = np.unpackbits(words[..., None], axis=-1, bitorder="little", count=tiling.bits)
    return np.packbits(spread.reshape(*words.shape[:2], -1), axis=-1, bitorder="little")


def _unpack_runs(runs: np.ndarray, tiling: Tiling) -> np.ndarray:
    if tiling.bits >= 8:
        return runs.view(tiling.word)
    spread = np.unpackbits(runs, axis=-1, bitorder="little")
    codes = np.packbits(
        spread.reshape(*runs.shape[:2], GROUP, tiling.bits), axis=-1, bitorder="little"
    )
    return codes[..., 0]


def _to_tiles(rows: np.ndarray, panels: int, groups: int) -> np.ndarray:
    """`[8 p, 64 g]` -> `[p g, 8, 64]`."""
    tiles = rows.reshape(panels, PANEL, groups, GROUP).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(tiles).reshape(-1, PANEL, GROUP)


def _to_rows(tiles: np.ndarray, panels: int, groups: int) -> np.ndarray:
    rows = tiles.reshape(panels, groups, PANEL, GROUP).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(rows).reshape(panels * PANEL, groups * GROUP)
