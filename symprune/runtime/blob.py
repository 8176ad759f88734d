"""A packed parameter: one matrix, or a stack of them, as a 1-D uint8 tensor that describes itself.

A header of 64 bytes, where each panel of 8 rows begins, the panels (`tiles.py`), and 64 zero bytes
so that kernels may read past the end. The reference codec is in numpy and needs no compiler; where
the compiled kernels are, they do the same, faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.runtime.kernels.library import DTYPES, WRONG, kernels
from symprune.runtime.layout import (
    BITS,
    FLOATS,
    HEADER,
    KINDS,
    MAGIC,
    MASKED,
    PADDING,
    TRANSPOSED,
    VERSION,
    Layout,
    describe,
    packed_name,
    parameter_name,
)
from symprune.runtime.tiles import GROUP, PANEL, Rows, find_tiles, pack_panels, unpack_panels
from symprune.values.grid import GRIDS

__all__ = [
    "Codes",
    "Layout",
    "check",
    "decode",
    "decode_codes",
    "describe",
    "encode_codes",
    "encode_floats",
    "keep_mask",
    "packed_name",
    "parameter_name",
]

AT_ONCE = 2**21  # weights

Codes = tuple[Tensor, Tensor, Tensor | None]


def encode_floats(
    pieces: Sequence[Tensor], *, transposed: bool = False, stacked: bool = False
) -> Tensor:
    """Matrices `[out, in]` of float32, bfloat16 or float16, bit for bit.

    Pruned is what is +0 bit for bit; there is a mask if the blob is smaller that way.
    """
    rows, columns = _common_shape(pieces, stacked)
    kind = next((name for name, dtype in FLOATS.items() if dtype == pieces[0].dtype), None)
    if kind is None or any(piece.dtype != pieces[0].dtype for piece in pieces):
        raise SympruneError("Only matrices of one of float32, bfloat16 and float16 can be packed.")
    words = [_bits_of(piece) for piece in pieces]
    kept = sum(int(np.count_nonzero(word)) for word in words)
    flags = TRANSPOSED * transposed
    full = Layout(kind, False, transposed, rows, columns, len(pieces) if stacked else 0, 0)
    weights = full.all_panels * PANEL * full.groups * GROUP
    if weights + BITS[kind] * kept < BITS[kind] * weights:
        flags |= MASKED
    return _encode(kind, flags, stacked, [Rows(word, None, word != 0) for word in words])


def encode_codes(
    pieces: Sequence[Codes], kind: str, *, transposed: bool = False, stacked: bool = False
) -> Tensor:
    """(codes uint8 `[out, in]`, scales bfloat16 `[out, groups of 64]`, keep bool or None) of each
    matrix; where `keep` is False the code does not matter. There is a mask if anything is pruned.
    """
    if kind not in BITS or kind in FLOATS:
        raise SympruneError(f"{kind!r} is not one of {', '.join(GRIDS)}.")
    rows, columns = _common_shape([codes for codes, _, _ in pieces], stacked)
    ready = []
    for codes, scales, keep in pieces:
        if codes.dtype != torch.uint8 or scales.dtype != torch.bfloat16:
            raise SympruneError("Codes must be uint8 and their scales bfloat16.")
        if scales.shape != (rows, -(-columns // GROUP)):
            raise SympruneError(
                f"Scales of shape {tuple(scales.shape)} do not fit codes of {rows} x {columns}: "
                f"every {GROUP} columns of a row share one."
            )
        if keep is not None and (keep.dtype != torch.bool or keep.shape != codes.shape):
            raise SympruneError("A keep-mask must be boolean and have the shape of its codes.")
        words = codes.detach().cpu().contiguous().numpy()
        kept = None if keep is None else keep.detach().cpu().contiguous().numpy()
        if not torch.isfinite(scales).all():
            raise SympruneError("A scale is not a finite number.")
        used = words if kept is None else words[kept]
        if used.size and (used.max() >> BITS[kind] or (kind == "int8" and not used.min())):
            raise SympruneError(f"A code is outside the levels of {kind}.")
        ready.append(Rows(words, _bits_of(scales), kept))
    masked = any(rows.keep is not None and not rows.keep.all() for rows in ready)
    return _encode(kind, MASKED * masked | TRANSPOSED * transposed, stacked, ready)


def check(blob: Tensor) -> None:
    """Walk every tile: afterwards no kernel can read outside the blob. One sentence if damaged."""
    layout = describe(blob)
    compiled = kernels()
    if compiled is not None and blob.device.type == "cpu" and blob.is_contiguous():
        wrong = compiled.packed_check(blob.data_ptr(), blob.numel())
        if wrong:
            raise SympruneError(f"A packed matrix is damaged: {WRONG[wrong]}.")
        return
    offsets = _offsets(blob, layout)
    if offsets[0] != 0 or offsets[-1] != layout.size - PADDING - layout.begin:
        raise SympruneError("A packed matrix is damaged: its panels do not fill it.")
    for piece in range(max(layout.pieces, 1)):
        for first in range(0, layout.panels, _at_once(layout)):
            panels = np.arange(first, min(first + _at_once(layout), layout.panels))
            found = read_panels(blob, layout, piece * layout.panels + panels)
            rows = layout.rows - first * PANEL
            for part in (found.words, found.keep):
                if part is not None and (part[rows:].any() or part[:, layout.columns :].any()):
                    raise SympruneError("A packed matrix is damaged: it has weights outside.")
            if found.scales is not None and np.any(found.scales & 0x7F80 == 0x7F80):
                raise SympruneError("A packed matrix is damaged: a scale is not a finite number.")


def decode(blob: Tensor, dtype: torch.dtype) -> Tensor:
    """The dense parameter in its own shape; in the dtype it was packed from, bit for bit."""
    layout = describe(blob)
    blob = blob.cpu().contiguous()
    full = torch.empty(max(layout.pieces, 1), layout.rows, layout.columns, dtype=dtype)
    compiled = kernels()
    if compiled is not None and dtype in DTYPES:
        check(blob)
        for piece in range(len(full)):
            if compiled.packed_expand(
                *(blob.data_ptr(), piece, 0, layout.rows, DTYPES[dtype], full[piece].data_ptr()),
                torch.get_num_threads(),
            ):
                raise MemoryError("No memory to expand a packed matrix.")
        return _in_own_shape(full, layout)
    for piece, here, rows in _walk(blob, layout):
        full[piece, here] = as_floats(rows, layout, dtype)
    return _in_own_shape(full, layout)


def decode_codes(blob: Tensor) -> list[Codes]:
    """(codes, scales, keep) of each matrix; a pruned weight has code 0, and without a mask `keep`
    is None."""
    layout = describe(blob)
    if not layout.quantised:
        raise SympruneError(f"A matrix packed as {layout.kind} has no codes.")
    size = (max(layout.pieces, 1), layout.rows)
    codes = torch.empty(*size, layout.columns, dtype=torch.uint8)
    scales = torch.empty(*size, layout.groups, dtype=torch.bfloat16)
    keep = torch.empty(*size, layout.columns, dtype=torch.bool) if layout.masked else None
    for piece, here, rows in _walk(blob, layout):
        assert rows.scales is not None
        codes[piece, here] = torch.from_numpy(rows.words)
        scales[piece, here] = _from_bits(rows.scales, torch.bfloat16)
        if keep is not None:
            keep[piece, here] = torch.from_numpy(rows.keep)
    kept = [None] * len(codes) if keep is None else list(keep)
    return list(zip(codes, scales, kept, strict=True))


def keep_mask(blob: Tensor) -> Tensor:
    """Where a weight is kept, in the parameter's own shape; without a mask, everywhere."""
    layout = describe(blob)
    full = torch.ones(max(layout.pieces, 1), layout.rows, layout.columns, dtype=torch.bool)
    if layout.masked:
        for piece, here, rows in _walk(blob, layout):
            full[piece, here] = torch.from_numpy(rows.keep)
    return _in_own_shape(full, layout)


def read_panels(blob: Tensor, layout: Layout, panels: np.ndarray) -> Rows:
    """The rows of some panels, filling included."""
    offsets = _offsets(blob, layout)
    data = blob[layout.begin : layout.size - PADDING].cpu().numpy()
    try:
        starts = find_tiles(
            data, offsets[panels], offsets[panels + 1], layout.groups, layout.tiling
        )
    except ValueError as problem:
        raise SympruneError(f"A packed matrix is damaged: {problem}.") from None
    return unpack_panels(data, starts, layout.tiling)


def as_floats(rows: Rows, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Weights of whole groups: scale * level in float32, then the dtype asked for."""
    if not layout.quantised:
        return _from_bits(rows.words, FLOATS[layout.kind]).to(dtype)
    assert rows.scales is not None
    levels = layout.grid.levels(torch.from_numpy(rows.words))
    scales = _from_bits(rows.scales, torch.bfloat16).float().repeat_interleave(GROUP, 1)
    weights = levels.mul_(scales[:, : levels.shape[1]])
    if rows.keep is not None:
        weights.masked_fill_(~torch.from_numpy(rows.keep), 0)
    return weights.to(dtype)


def _encode(kind: str, flags: int, stacked: bool, pieces: Sequence[Rows]) -> Tensor:
    rows, columns = pieces[0].words.shape
    masked, transposed = bool(flags & MASKED), bool(flags & TRANSPOSED)
    layout = Layout(kind, masked, transposed, rows, columns, len(pieces) * stacked, 0)
    packed = [_pack(piece, layout) for piece in pieces]
    ends = np.cumsum(np.concatenate([sizes for _, sizes in packed]))
    offsets = np.concatenate([np.zeros(1), ends]).astype("<i8")
    size = layout.begin + int(offsets[-1]) + PADDING
    head = HEADER.pack(MAGIC, VERSION, KINDS.index(kind), flags, rows, columns, layout.pieces, size)
    parts = [np.frombuffer(head, np.uint8), offsets.view(np.uint8)]
    parts += [stream for stream, _ in packed]
    return torch.from_numpy(np.concatenate([*parts, np.zeros(PADDING, np.uint8)]))


def _pack(piece: Rows, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """(the panels of one matrix as a stream, the bytes of each)."""
    compiled = kernels()
    if compiled is None:
        step = _at_once(layout) * PANEL
        parts = []
        for first in range(0, layout.rows, step):
            part = _filled(piece, slice(first, min(first + step, layout.rows)), layout)
            parts.append(pack_panels(part, layout.tiling))
        streams, sizes = zip(*parts, strict=True)
        return np.concatenate(streams), np.concatenate(sizes)
    offsets = np.empty(layout.panels + 1, np.int64)
    words, scales, keep = (None if part is None else np.ascontiguousarray(part) for part in piece)

    def encode(data: np.ndarray | None) -> None:
        compiled.packed_encode(
            *(KINDS.index(layout.kind), layout.masked, layout.rows, layout.columns),
            *(None if part is None else part.ctypes.data for part in (words, scales, keep)),
            offsets.ctypes.data,
            None if data is None else data.ctypes.data,
            torch.get_num_threads(),
        )

    encode(None)
    stream = np.empty(offsets[-1], np.uint8)
    encode(stream)
    return stream, np.diff(offsets)


def _filled(piece: Rows, here: slice, layout: Layout) -> Rows:
    """Some rows of a matrix, filled to whole panels and groups."""
    count = here.stop - here.start
    below = -count % PANEL
    right = layout.groups * GROUP - layout.columns
    around = ((0, below), (0, right))
    words = np.pad(piece.words[here], around)
    scales = None if piece.scales is None else np.pad(piece.scales[here], ((0, below), (0, 0)))
    keep = None
    if layout.masked:
        kept = np.ones((count, layout.columns), bool) if piece.keep is None else piece.keep[here]
        keep = np.pad(kept, around)
    return Rows(words, scales, keep)


def _walk(blob: Tensor, layout: Layout) -> Iterator[tuple[int, slice, Rows]]:
    """Some rows after the other, without what fills them up."""
    for piece in range(max(layout.pieces, 1)):
        for first in range(0, layout.panels, _at_once(layout)):
            panels = np.arange(first, min(first + _at_once(layout), layout.panels))
            found = read_panels(blob, layout, piece * layout.panels + panels)
            here = slice(first * PANEL, min((first + len(panels)) * PANEL, layout.rows))
            yield piece, here, found.cut(here.stop - here.start, layout.columns)


def _at_once(layout: Layout) -> int:
    """How many panels fit into the memory a chunk may take."""
    return max(AT_ONCE // (layout.groups * GROUP * PANEL), 1)


def _offsets(blob: Tensor, layout: Layout) -> np.ndarray:
    return blob[HEADER.size : layout.begin].cpu().numpy().view("<i8")


def _common_shape(pieces: Sequence[Tensor], stacked: bool) -> tuple[int, int]:
    if not pieces or (len(pieces) > 1 and not stacked):
        raise SympruneError("A packed parameter is one matrix, or a stack of them.")
    shapes = {tuple(piece.shape) for piece in pieces}
    shape = shapes.pop()
    if shapes or len(shape) != 2 or 0 in shape:
        raise SympruneError("Only matrices of one shape, with at least one weight, can be packed.")
    return shape[0], shape[1]


def _in_own_shape(full: Tensor, layout: Layout) -> Tensor:
    turned = full.transpose(1, 2).contiguous() if layout.transposed else full
    return turned.view(layout.shape)


def _bits_of(values: Tensor) -> np.ndarray:
    """The bits of 16 or 32 bit floats."""
    plain = values.detach().cpu().contiguous()
    whole = torch.int32 if plain.element_size() == 4 else torch.int16
    return plain.view(whole).numpy().view("<u4" if plain.element_size() == 4 else "<u2")


def _from_bits(words: np.ndarray, dtype: torch.dtype) -> Tensor:
    signed = np.ascontiguousarray(words).view("<i4" if words.itemsize == 4 else "<i2")
    return torch.from_numpy(signed).view(dtype)
