"""Multiplying from packed matrices: fused for a few tokens, through torch for long prompts.

With the compiled kernels a token costs one pass over the packed bytes. Codes multiply inputs that
are rounded to 8 bits, with one scale for each 64 of them; floats multiply them as they are, in
float32. What comes out for a token depends neither on the number of threads nor, up to the length
where torch takes over, on the other tokens. Without the kernels everything works through the
portable path: some rows are expanded, torch multiplies them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from symprune.errors import SympruneError
from symprune.runtime.blob import as_floats, check, read_panels
from symprune.runtime.kernels import library as _library
from symprune.runtime.kernels.library import DTYPES, force_level, level, levels
from symprune.runtime.layout import FLOATS, Layout, describe
from symprune.runtime.tiles import PANEL

__all__ = ["expand_rows", "force_level", "gather_rows", "level", "levels", "multiply"]

ROWS_AT_ONCE = 512
TOKENS_AT_ONCE = 64  # inputs that stay in a core's cache
# From how many tokens on torch multiplies faster, the expanding included.
LONG_FOR_CODES, LONG_FOR_FLOATS = 96, 24


@dataclass(frozen=True)
class _Known:
    """A blob that has been checked, as long as it is the same tensor with the same contents."""

    tensor: weakref.ref[Tensor]
    address: int
    version: int
    layout: Layout


_known: dict[int, _Known] = {}


def multiply(blob: Tensor, x: Tensor, *, piece: int = 0, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for `x` `[..., columns]`, in the dtype of `x`: `[..., rows]`."""
    layout = checked(blob)
    shape = x.shape
    if shape[-1] != layout.columns:
        raise SympruneError(
            f"An input of {shape[-1]} channels does not fit a matrix of {layout.columns} columns."
        )
    if not x.is_cpu or (bias is not None and (not bias.is_cpu or bias.shape != (layout.rows,))):
        raise SympruneError(
            f"A packed matrix of {layout.rows} rows needs its input and bias in the CPU's memory, "
            "and one number of the bias for each row."
        )
    dtype = DTYPES.get(x.dtype)
    if dtype is None or not 0 <= piece < (layout.pieces or 1):
        _check_dtype(x.dtype)
        _check_piece(layout, piece)
    out_shape = (*shape[:-1], layout.rows)
    tokens = x.numel() // layout.columns
    kernels = _library.kernels()
    if x.requires_grad and torch.is_grad_enabled():
        weight = expand_rows(blob, 0, layout.rows, x.dtype, piece)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
        bias = bias.to(x.dtype).contiguous()
    if kernels is None or _is_long(layout, tokens, x.dtype):
        return _multiply_by_torch(blob, layout, x, piece, bias).view(out_shape)
    if not x.is_contiguous():
        x = x.contiguous()
    out = torch.empty(*out_shape, dtype=x.dtype)
    threads = torch.get_num_threads()
    for first in range(0, tokens, TOKENS_AT_ONCE):
        failed = kernels.packed_multiply(
            blob.data_ptr(),
            piece,
            x.data_ptr() + first * layout.columns * x.element_size(),
            min(TOKENS_AT_ONCE, tokens - first),
            dtype,
            None if bias is None else bias.data_ptr(),
            out.data_ptr() + first * layout.rows * x.element_size(),
            threads,
        )
        if failed:
            raise MemoryError("No memory to multiply a packed matrix.")
    return out


def expand_rows(blob: Tensor, first: int, count: int, dtype: torch.dtype, piece: int = 0) -> Tensor:
    """Rows `first` to `first + count` of a matrix, dense: `[count, columns]`."""
    layout = checked(blob)
    _check_piece(layout, piece)
    _check_dtype(dtype)
    if first < 0 or count < 0 or first + count > layout.rows:
        raise SympruneError(
            f"Rows {first} to {first + count} are not all in a matrix of {layout.rows} rows."
        )
    return _expand_into(torch.empty(count, layout.columns, dtype=dtype), blob, layout, first, piece)


def gather_rows(blob: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows by their numbers, an embedding's look-up: `[..., columns]` for indices `[...]`."""
    layout = checked(blob)
    _check_dtype(dtype)
    rows = indices.reshape(-1).cpu().long().contiguous()
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= layout.rows):
        raise SympruneError(f"An index is outside a matrix of {layout.rows} rows.")
    shape = (*indices.shape, layout.columns)
    kernels = _library.kernels()
    if kernels is None:
        panels, where = torch.unique(rows // PANEL, return_inverse=True)
        found = as_floats(read_panels(blob, layout, panels.numpy()), layout, dtype)
        return found[where * PANEL + rows % PANEL, : layout.columns].reshape(shape)
    out = torch.empty(shape, dtype=dtype)
    if kernels.packed_gather(
        *(blob.data_ptr(), rows.data_ptr(), rows.numel(), DTYPES[dtype], out.data_ptr()),
        torch.get_num_threads(),
    ):
        raise MemoryError("No memory to expand rows of a packed matrix.")
    return out


def checked(blob: Tensor) -> Layout:
    """What a blob holds; the first time a tensor is seen, or its contents have changed, every tile
    of it is checked, so that no kernel ever reads outside it."""
    known = _known.get(id(blob))
    if (
        known is not None
        and known.tensor() is blob
        and known.address == blob.data_ptr()
        and known.version == _version(blob)
    ):
        return known.layout
    if blob.device.type != "cpu" or not blob.is_contiguous():
        raise SympruneError("The kernels multiply packed matrices in the CPU's memory.")
    check(blob)
    key = id(blob)
    _known[key] = _Known(
        weakref.ref(blob, lambda _: _known.pop(key, None)),
        blob.data_ptr(),
        _version(blob),
        describe(blob),
    )
    return _known[key].layout


def _version(blob: Tensor) -> int:
    """Changes with every change in place; tensors of inference mode do not count them."""
    return -1 if blob.is_inference() else blob._version


def _is_long(layout: Layout, tokens: int, dtype: torch.dtype) -> bool:
    """Whether torch is faster from expanded rows. Its float32 never is against our integers where
    there are instructions for them."""
    if not layout.quantised:
        return tokens > LONG_FOR_FLOATS
    if _library.multiplies_bfloat16_fast() or _library.level() != "avx512":
        return tokens > LONG_FOR_CODES
    return False


def _multiply_by_torch(
    blob: Tensor, layout: Layout, x: Tensor, piece: int, bias: Tensor | None
) -> Tensor:
    """Rows are expanded some at a time, in the type torch multiplies fastest on this CPU: bfloat16
    where there are instructions for it and the matrix is of codes, or matrix and inputs are
    bfloat16 themselves; else float32."""
    fits = layout.quantised or (layout.kind == "bfloat16" and x.dtype == torch.bfloat16)
    fast = _library.kernels() is not None and _library.multiplies_bfloat16_fast()
    dtype = torch.bfloat16 if fast and fits else torch.float32
    inputs = x.reshape(-1, layout.columns).to(dtype)
    out = torch.empty(len(inputs), layout.rows, dtype=dtype)
    scratch = torch.empty(min(ROWS_AT_ONCE, layout.rows), layout.columns, dtype=dtype)
    for first in range(0, layout.rows, ROWS_AT_ONCE):
        rows = _expand_into(scratch[: layout.rows - first], blob, layout, first, piece)
        torch.mm(inputs, rows.T, out=out[:, first : first + len(rows)])
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def _expand_into(out: Tensor, blob: Tensor, layout: Layout, first: int, piece: int) -> Tensor:
    kernels = _library.kernels()
    if kernels is None:
        panels = np.arange(first // PANEL, -(-(first + len(out)) // PANEL))
        found = read_panels(blob, layout, piece * layout.panels + panels)
        rows = slice(first % PANEL, first % PANEL + len(out))
        return out.copy_(as_floats(found, layout, out.dtype)[rows, : layout.columns])
    if kernels.packed_expand(
        *(blob.data_ptr(), piece, first, len(out), DTYPES[out.dtype], out.data_ptr()),
        torch.get_num_threads(),
    ):
        raise MemoryError("No memory to expand rows of a packed matrix.")
    return out


def _check_piece(layout: Layout, piece: int) -> None:
    if not 0 <= piece < (layout.pieces or 1):
        raise SympruneError(f"There is no matrix {piece} in a stack of {layout.pieces or 1}.")


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOATS.values():
        name = str(dtype).removeprefix("torch.")
        raise SympruneError(f"Packed matrices multiply float32, bfloat16 and float16, not {name}.")
