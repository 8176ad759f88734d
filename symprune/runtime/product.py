"""Products and rows of packed matrices wherever they are; gradients pass through to the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from symprune.runtime import decompress, multiply
from symprune.runtime.blob import FLOATS, Layout
from symprune.runtime.kernels.library import DTYPES

ROWS_AT_ONCE = 2048
"""Rows that the backward pass has dense at a time."""


def product(
    blob: Tensor, layout: Layout, x: Tensor, *, piece: int = 0, bias: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias` in the type of `x`; the packed weights themselves have no gradient."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _Product.apply(x, bias, blob, layout, piece)  # type: ignore[no-any-return]
    return _multiply(blob, x, piece, bias)


def checked(blob: Tensor) -> Layout:
    """What a blob holds. Before its first use it is checked: nothing is read outside it then."""
    return _room(blob).checked(blob)  # type: ignore[no-any-return]


def rows_of(blob: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows by their numbers: an embedding's look-up."""
    found = _room(blob).gather_rows(blob, indices, _near(dtype))
    return found.to(dtype)


def expand(
    blob: Tensor, layout: Layout, dtype: torch.dtype, piece: int = 0, rows: slice = slice(None)
) -> Tensor:
    """One matrix of a blob, or some rows of it, dense: `[out, in]`."""
    first, end, _ = rows.indices(layout.rows)
    found = _room(blob).expand_rows(blob, first, end - first, _near(dtype), piece)
    return found.to(dtype)


def _multiply(blob: Tensor, x: Tensor, piece: int, bias: Tensor | None) -> Tensor:
    if x.dtype in DTYPES and blob.is_cpu:  # at once: this is most of what a small product takes
        return multiply.multiply(blob, x, piece=piece, bias=bias)
    found = _room(blob).multiply(blob, x.to(_near(x.dtype)), piece=piece, bias=bias)
    return found.to(x.dtype)


def _room(blob: Tensor) -> Any:
    return multiply if blob.is_cpu else decompress


def _near(dtype: torch.dtype) -> torch.dtype:
    """The type a product in `dtype` is computed in."""
    return dtype if dtype in FLOATS.values() else torch.float32


class _Product(torch.autograd.Function):
    """The weights are expanded again in the backward pass instead of kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, blob: Tensor, layout: Layout, piece: int
    ) -> Tensor:
        ctx.matrix, ctx.dtype = (blob, layout, piece), x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _multiply(blob, x, piece, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        (blob, layout, piece), to_x, to_bias = ctx.matrix, None, None
        if ctx.needs_input_grad[0]:
            # A CPU is slow and inexact in 16 bits; other devices are neither.
            dtype = torch.float32 if blob.device.type == "cpu" else _near(ctx.dtype)
            given = gradient.to(dtype)
            total = given.new_zeros(*given.shape[:-1], layout.columns)
            for first in range(0, layout.rows, ROWS_AT_ONCE):
                rows = slice(first, min(first + ROWS_AT_ONCE, layout.rows))
                total = total + given[..., rows] @ expand(blob, layout, dtype, piece, rows)
            to_x = total.to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            to_bias = gradient.reshape(-1, layout.rows).sum(0).to(ctx.bias_dtype)
        return to_x, to_bias, None, None, None
