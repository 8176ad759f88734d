"""What a packed parameter says about itself: its header, its shape, its name in a checkpoint."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.runtime.tiles import GROUP, PANEL, Tiling
from symprune.values.grid import GRIDS, Grid

MAGIC = b"SYMPACK\x01"
VERSION = 1
HEADER = struct.Struct("<8s6IQ24x")
PADDING = 64
MASKED, TRANSPOSED = 1, 2
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = (
    *("float32", "bfloat16", "float16"),
    *("int8", "int4", "int3", "int2"),
    *("int4z", "int3z", "int2z"),
)  # in the order of their numbers
BITS = {"float32": 32, "bfloat16": 16, "float16": 16} | {
    name: grid.bits for name, grid in GRIDS.items()
}


@dataclass(frozen=True)
class Layout:
    """What a blob holds. A matrix is `[rows, columns]` = `[out, in]`, however the model has it."""

    kind: str
    masked: bool
    transposed: bool
    rows: int
    columns: int
    pieces: int  # 0 for a plain matrix, else how many are stacked
    size: int  # bytes of the whole blob

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's own shape."""
        matrix = (self.columns, self.rows) if self.transposed else (self.rows, self.columns)
        return (self.pieces, *matrix) if self.pieces else matrix

    @property
    def bits(self) -> int:
        """Of the whole blob: masks, scales and header included."""
        return 8 * self.size

    @property
    def weights(self) -> int:
        return math.prod(self.shape)

    @property
    def quantised(self) -> bool:
        return self.kind not in FLOATS

    @property
    def grid(self) -> Grid:
        """What codes stand for."""
        return GRIDS[self.kind]

    @property
    def groups(self) -> int:
        """Groups of columns."""
        return -(-self.columns // GROUP)

    @property
    def panels(self) -> int:
        """Panels of one matrix."""
        return -(-self.rows // PANEL)

    @property
    def all_panels(self) -> int:
        return max(self.pieces, 1) * self.panels

    @property
    def begin(self) -> int:
        """The first byte of the data."""
        return HEADER.size + 8 * (self.all_panels + 1)

    @property
    def tiling(self) -> Tiling:
        return Tiling(BITS[self.kind], self.quantised, self.masked)


def packed_name(parameter_name: str) -> str:
    """`X.weight` -> `X.packed`, any other `X.gate_up_proj` -> `X.gate_up_proj_packed`."""
    module, dot, name = parameter_name.rpartition(".")
    return f"{module}{dot}packed" if name == "weight" else f"{parameter_name}_packed"


def parameter_name(packed_name: str) -> str:
    """The inverse of `packed_name`."""
    module, dot, name = packed_name.rpartition(".")
    if name == "packed":
        return f"{module}{dot}weight"
    if not name.endswith("_packed"):
        raise SympruneError(f"{packed_name!r} is not the name of a packed parameter.")
    return packed_name.removesuffix("_packed")


def describe(blob: Tensor) -> Layout:
    """What a blob says about itself; one sentence if it is none, or of another version."""
    if blob.dtype != torch.uint8 or blob.dim() != 1 or blob.numel() < HEADER.size + PADDING:
        raise SympruneError("This tensor is not a packed matrix.")
    head = bytes(blob[: HEADER.size].cpu().numpy())
    magic, version, number, flags, rows, columns, pieces, size = HEADER.unpack(head)
    if magic != MAGIC or (any(head[-24:]) and version == VERSION):
        raise SympruneError("This tensor is not a packed matrix.")
    if version != VERSION:
        raise SympruneError(
            f"This matrix is packed in version {version} of the format; "
            f"this symprune reads version {VERSION}."
        )
    if number >= len(KINDS) or flags & ~(MASKED | TRANSPOSED) or not rows or not columns:
        raise SympruneError("The header of a packed matrix is damaged.")
    layout = Layout(
        KINDS[number], bool(flags & MASKED), bool(flags & TRANSPOSED), rows, columns, pieces, size
    )
    least = layout.begin + layout.all_panels * layout.groups * layout.tiling.least + PADDING
    if size != blob.numel() or size < least:
        raise SympruneError("A packed matrix is cut off, or its header is damaged.")
    return layout
