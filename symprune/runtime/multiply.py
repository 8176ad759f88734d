"""Multiplying from packed matrices: fused for a few tokens, through torch for long prompts.

With the compiled kernels a token costs one pass over the packed bytes. Without them everything
works through the portable path: some rows are expanded, torch multiplies them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.runtime.blob import FLOATS, Layout, as_floats, describe, read_panels
from symprune.runtime.tiles import PANEL

PORTABLE = "portable"
ROWS_AT_ONCE = 512


def multiply(blob: Tensor, x: Tensor, *, piece: int = 0, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for `x` `[..., columns]`, in the dtype of `x`: `[..., rows]`."""
    layout = _described(blob, piece)
    _check_dtype(x.dtype)
    if x.shape[-1] != layout.columns:
        raise SympruneError(
            f"An input of {x.shape[-1]} channels does not fit a matrix of {layout.columns} columns."
        )
    tokens = x.reshape(-1, layout.columns).float()
    out = torch.empty(len(tokens), layout.rows)
    for first in range(0, layout.rows, ROWS_AT_ONCE):
        count = min(ROWS_AT_ONCE, layout.rows - first)
        out[:, first : first + count] = (
            tokens @ expand_rows(blob, first, count, torch.float32, piece).T
        )
    if bias is not None:
        out += bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], layout.rows)


def expand_rows(blob: Tensor, first: int, count: int, dtype: torch.dtype, piece: int = 0) -> Tensor:
    """Rows `first` to `first + count` of a matrix, dense: `[count, columns]`."""
    layout = _described(blob, piece)
    _check_dtype(dtype)
    if first < 0 or count < 0 or first + count > layout.rows:
        raise SympruneError(
            f"Rows {first} to {first + count} are not all in a matrix of {layout.rows} rows."
        )
    panels = np.arange(first // PANEL, -(-(first + count) // PANEL))
    found = read_panels(blob, layout, piece * layout.panels + panels)
    skip = first % PANEL
    return as_floats(found, layout, dtype)[skip : skip + count, : layout.columns].contiguous()


def gather_rows(blob: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows by their numbers, an embedding's look-up: `[..., columns]` for indices `[...]`."""
    layout = _described(blob, 0)
    _check_dtype(dtype)
    rows = indices.reshape(-1).long()
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= layout.rows):
        raise SympruneError(f"An index is outside a matrix of {layout.rows} rows.")
    panels, where = torch.unique(rows // PANEL, return_inverse=True)
    found = as_floats(read_panels(blob, layout, panels.numpy()), layout, dtype)
    chosen = found[where * PANEL + rows % PANEL, : layout.columns]
    return chosen.reshape(*indices.shape, layout.columns)


def level() -> str:
    """The instructions in use."""
    return PORTABLE


def levels() -> list[str]:
    """What this machine can do, the best first."""
    return [PORTABLE]


def force_level(name: str | None) -> None:
    """Use a certain level from now on; None for the best."""
    if name is not None and name not in levels():
        raise SympruneError(f"There is no kernel {name!r} here; there are {', '.join(levels())}.")


def _described(blob: Tensor, piece: int) -> Layout:
    layout = describe(blob)
    if not 0 <= piece < max(layout.pieces, 1):
        raise SympruneError(f"There is no matrix {piece} in a stack of {max(layout.pieces, 1)}.")
    return layout


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOATS.values():
        raise SympruneError(f"Packed matrices multiply float32, bfloat16 and float16, not {dtype}.")
