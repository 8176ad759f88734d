"""Gram matrices whose bits do not depend on the order in which samples were added.

G = sum_n X[n]^T X[n]. A sample's product is an fp32 matrix, rounded to multiples of q_ij, a power
of two about 2^-27 of what channels i and j came to in the first sample. Sums of such multiples are
exact, so they have no order, as long as they stay below 2^49 q_ij: an fp32 number and the fp32 rest
of its rounding hold them. G is symmetric, so the half below the diagonal has room for the rests,
and an exact sum takes the memory of a rounded one. Knows tensors only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from symprune.errors import SympruneError
from symprune.machine import durable

STRIPE, MOST_STRIPES = 256, 8  # of channels, in which the symmetric half is added up
CACHED = 2**15  # of a matrix's numbers that a CPU works on at once: few enough to stay in the cache
SENT = 2**24  # of a matrix's numbers that are on the device at once while it is reduced
DIGITS = 28  # binary ones that are kept of a product, counted from the first sample's size
ROUND_TO_ONE = 1.5 * 2.0**52  # added and taken away again, it leaves a whole number in fp64


@dataclass(frozen=True)
class _Piece:
    """Some rows and columns on or above the diagonal: their sums and the rests of these."""

    rows: slice
    columns: slice
    sums: Tensor
    rests: Tensor

    def total(self) -> Tensor:
        return self.sums.double() + self.rests.double()

    def store(self, total: Tensor) -> None:
        """Overwrites total."""
        self.sums.copy_(total)
        self.rests.copy_(total.sub_(self.sums))


class GramSum:
    """The sum, in the blocks on and above the diagonal of `matrix`; `whole` mirrors them.

    Args:
        channels: How many there are.
        device: Where it is; `disk` is a memory-mapped file.
        scale: A power of two for each channel, from `scale_of`, that all who add to this sum
            agree on; 0 for a channel whose products are not rounded. If None, the first sample's.
    """

    def __init__(
        self, channels: int, device: torch.device | str, scale: Tensor | None = None
    ) -> None:
        self.channels = channels
        self.there = device
        self.width = _stripe_width(channels)
        self.matrix = _square(channels, device)
        self.scale = None if scale is None else scale.to(self.matrix.device)
        # The blocks on the diagonal have no mirror image to keep their rests in.
        self.corner = self.matrix.new_zeros(channels, self.width)
        self._mirrored = False

    def add(self, sample: Tensor) -> None:
        """Add the products of `[tokens, channels]`, fp32."""
        self._begin()
        if self.scale is None:
            self.scale = scale_of(sample).to(self.matrix.device)
        most = CACHED if self.matrix.device.type == "cpu" else self.width**2
        for start, end in self._stripes():
            products = (sample[:, start:end].T @ sample[:, start:]).to(self.matrix.device)
            for piece in self._pieces(start, end, most):
                rows, columns = piece.rows, piece.columns
                product = products[
                    rows.start - start : rows.stop - start,
                    columns.start - start : columns.stop - start,
                ]
                total = _round(product, self.scale[rows], self.scale[columns])
                piece.store(total.add_(piece.sums).add_(piece.rests))

    def merge(self, other: GramSum) -> None:
        """Add another sum."""
        self._begin()
        other._begin()
        for mine, others in zip(self._all(CACHED), other._all(CACHED), strict=True):
            mine.store(mine.total().add_(others.total().to(self.matrix.device)))

    def all_reduce(self, device: torch.device) -> None:
        """Add up over all processes, in pieces that visit the device."""
        self._begin()
        for piece in self._all(SENT):
            visiting = piece.total().to(device)
            dist.all_reduce(visiting)
            piece.store(visiting.to(self.matrix.device))

    def state(self) -> dict[str, Tensor]:
        """Everything but the scale, as tensors; `load` takes it over."""
        if self._mirrored:
            return {"gram": self.matrix.triu(), "gram_rest": torch.zeros_like(self.corner)}
        return {"gram": self.matrix, "gram_rest": self.corner}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.matrix.copy_(state["gram"])
        self.corner.copy_(state["gram_rest"])
        self._mirrored = False

    def upper(self) -> tuple[Tensor, Tensor]:
        """What is on and above the diagonal, row by row: the sums, and the rests of these."""
        self._begin()
        sums, rests = [], []
        for start, end in self._stripes():
            inside = self._above(start, end)
            sums.append(self.matrix[start:end, start:][inside])
            beside = self.matrix[end:, start:end].T
            rests.append(torch.cat([self.corner[start:end, : end - start], beside], 1)[inside])
        return torch.cat(sums), torch.cat(rests)

    def load_upper(self, sums: Tensor, rests: Tensor) -> None:
        """Take over what `upper()` gave."""
        at = 0
        for start, end in self._stripes():
            inside = self._above(start, end)
            here = slice(at, at + int(inside.sum()))
            self.matrix[start:end, start:][inside] = sums[here].to(self.matrix.device)
            stripe = self.matrix.new_zeros(inside.shape)
            stripe[inside] = rests[here].to(self.matrix.device)
            self.corner[start:end, : end - start] = stripe[:, : end - start]
            self.matrix[end:, start:end] = stripe[:, end - start :].T
            at = here.stop
        self._mirrored = False

    def _above(self, start: int, end: int) -> Tensor:
        """Of a stripe from its diagonal on, what is not below the diagonal."""
        size = (end - start, self.channels - start)
        return torch.ones(size, dtype=torch.bool, device=self.matrix.device).triu()

    def whole(self) -> Tensor:
        """G, fp32 and symmetric to the last bit, which a product alone need not be.

        It takes the place of the rests: what is added later is added to the rounded matrix.
        """
        for start, end in self._stripes():
            square = self.matrix[start:end, start:end]
            square.copy_(square.triu() + square.triu(1).T)
            self.matrix[end:, start:end] = self.matrix[start:end, end:].T
        self._mirrored = True
        return self.matrix

    def reorder(self, order: Tensor) -> None:
        """Channel order[i] becomes channel i, for good: the rests are rounded away."""
        matrix = self.whole()
        order = order.to(matrix.device)
        for some in matrix.split(self.width):
            some.copy_(some.index_select(1, order))
        for some in matrix.split(self.width, dim=1):
            some.copy_(some.index_select(0, order))
        if self.scale is not None:
            self.scale = self.scale.index_select(0, order)

    def _begin(self) -> None:
        """Make room for rests where the mirrored half is."""
        if self._mirrored:
            for piece in self._all(SENT):
                piece.rests.zero_()
            self._mirrored = False

    def _stripes(self) -> list[tuple[int, int]]:
        starts = range(0, self.channels, self.width)
        return [(start, min(start + self.width, self.channels)) for start in starts]

    def _all(self, most: int) -> Iterator[_Piece]:
        for start, end in self._stripes():
            yield from self._pieces(start, end, most)

    def _pieces(self, start: int, end: int, most: int) -> Iterator[_Piece]:
        """The blocks of a stripe from its diagonal on, in pieces of at most `most` numbers."""
        for left, right in self._stripes():
            if left < start:
                continue
            if left == start:
                rests = self.corner[start:end, : end - start]
            else:
                rests = self.matrix[left:right, start:end].T
            step = max(1, most // (right - left))
            for row in range(start, end, step):
                rows, columns = slice(row, min(row + step, end)), slice(left, right)
                within = slice(rows.start - start, rows.stop - start)
                yield _Piece(rows, columns, self.matrix[rows, columns], rests[within])


class CrossSum:
    """sum_n L[n]^T R[n], exact as a `GramSum` is, for the same channels on both sides.

    It is not symmetric, so the rests of the sums take a matrix of their own.
    """

    def __init__(self, channels: int, device: torch.device | str) -> None:
        self.channels = channels
        self.matrix, self.rests = _square(channels, device), _square(channels, device)

    def add(self, left: Tensor, right: Tensor, scale: Tensor) -> None:
        """Add the products of two `[tokens, channels]`, fp32, rounded by the scale of a `GramSum`
        they go with."""
        width = _stripe_width(self.channels)
        most = CACHED if self.matrix.device.type == "cpu" else width * self.channels
        for start in range(0, self.channels, width):
            products = (left[:, start : start + width].T @ right).to(self.matrix.device)
            for piece in self._pieces(start, start + width, most):
                product = products[piece.rows.start - start : piece.rows.stop - start]
                total = _round(product, scale[piece.rows], scale)
                piece.store(total.add_(piece.sums).add_(piece.rests))

    def merge(self, other: CrossSum) -> None:
        """Add another sum."""
        every = (0, self.channels, CACHED)
        for mine, others in zip(self._pieces(*every), other._pieces(*every), strict=True):
            mine.store(mine.total().add_(others.total().to(self.matrix.device)))

    def all_reduce(self, device: torch.device) -> None:
        """Add up over all processes, in pieces that visit the device."""
        for piece in self._pieces(0, self.channels, SENT):
            visiting = piece.total().to(device)
            dist.all_reduce(visiting)
            piece.store(visiting.to(self.matrix.device))

    def _pieces(self, start: int, end: int, most: int) -> Iterator[_Piece]:
        """Whole rows, at most `most` numbers together."""
        end, step = min(end, self.channels), max(1, most // self.channels)
        for row in range(start, end, step):
            rows = slice(row, min(row + step, end))
            yield _Piece(rows, slice(0, self.channels), self.matrix[rows], self.rests[rows])


def _round(product: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """fp32 -> fp64, to multiples that the scales of its rows and columns say."""
    multiples = torch.outer(rows, columns)
    multiples *= ROUND_TO_ONE * 2.0**-DIGITS
    return (multiples + product).sub_(multiples)


def scale_of(sample: Tensor) -> Tensor:
    """For each channel of `[tokens, channels]` a power of two from its norm to twice that; 0
    for one that is zero."""
    energy = torch.linalg.vector_norm(sample, dim=0).double().square()
    half = (torch.frexp(energy).exponent.long() + 1) >> 1
    power = ((half + 1023).clamp(1, 2046) << 52).view(torch.float64)  # exact, unlike pow
    return torch.where(energy > 0, power, torch.zeros_like(power))


def memory_of(channels: int, crossed: bool = False) -> int:
    """Bytes a sum takes, with a `CrossSum` beside it or without."""
    alone = 4 * channels * (channels + _stripe_width(channels))
    return alone + 8 * channels * channels if crossed else alone


def _stripe_width(channels: int) -> int:
    return -(-channels // max(1, min(MOST_STRIPES, channels // STRIPE)))


def _square(width: int, device: torch.device | str) -> Tensor:
    """Zeros, fp32; on `disk` in a memory-mapped file that is gone when the tensor is."""
    if device != "disk":
        return torch.zeros(width, width, dtype=torch.float32, device=device)
    size = 4 * width * width
    try:
        with tempfile.NamedTemporaryFile(prefix="symprune-gram-") as file:
            durable.take_room(file.fileno(), size)
            return torch.from_file(file.name, shared=True, size=width * width).view(width, width)
    except OSError as error:
        raise SympruneError(
            f"A Gram matrix of {size / 1e9:.1f} GB cannot be kept in {tempfile.gettempdir()}: "
            f"{error.strerror}; TMPDIR says where else."
        ) from error
