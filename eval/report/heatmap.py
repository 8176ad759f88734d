"""The thesis's Figure 6.1: a weight matrix and its mask side by side, as small pictures.

One matrix is read from the folder, nothing else of the model. The whole matrix is shown as averages
over blocks, and a corner of it weight by weight.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from symprune.errors import SympruneError
from symprune.eval.report.page import figure_text
from symprune.masks import unpack_bits
from symprune.maskset import FILE_NAME
from symprune.runtime.blob import decode, packed_name
from symprune.validation import parse_json

BLOCKS = 192
CORNER = 48
RAMP = (
    (0, 34, 78),
    (53, 69, 108),
    (102, 105, 112),
    (148, 142, 119),
    (200, 184, 102),
    (254, 232, 56),
)
"""Dark blue to yellow: even in lightness, and the same to colour-blind eyes."""


@dataclass(frozen=True)
class Pair:
    """A matrix as `[out, in]`: its pruned weights, where the folder has them, and its mask."""

    name: str
    weight: Tensor | None
    keep: Tensor


def choose(layers: Sequence[Mapping[str, Any]], matrix: str | None) -> Mapping[str, Any]:
    """The layer of that name, or one in the middle of the model."""
    if matrix is None:
        return layers[len(layers) // 2]
    for layer in layers:
        if matrix in (layer["name"], str(layer["name"]).removesuffix(".weight")):
            return layer
    near = get_close_matches(matrix, [str(layer["name"]) for layer in layers], n=1, cutoff=0.3)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise SympruneError(f"The run has no matrix {matrix}{hint}")


def read(folder: Path, layers: Sequence[Mapping[str, Any]], matrix: str | None) -> Pair | None:
    """The chosen matrix and its mask; None when the folder holds neither."""
    layer = choose(layers, matrix)
    masks, shapes = _masks_of(folder)
    name = str(layer["name"])
    parameter, expert = name, None
    if shapes and name not in shapes:
        parent, _, last = name.rpartition(".")
        if parent in shapes and last.isdigit():
            parameter, expert = parent, int(last)
    weight = _weight(folder, parameter, expert)
    keep = masks(parameter) if parameter in shapes else None
    if keep is not None and expert is not None:
        keep = keep[expert]
    if keep is None:
        if weight is None and matrix is not None:
            raise SympruneError(f"{folder} holds neither weights nor a mask of {matrix}.")
        keep = None if weight is None else weight != 0
    if keep is None or keep.dim() != 2:
        return None
    if weight is not None and weight.shape != keep.shape:
        raise SympruneError(f"The mask of {name} in {folder} does not have its weights' shape.")
    if _is_transposed(layer, layers, shapes):
        keep, weight = keep.T, None if weight is None else weight.T
    return Pair(name, weight, keep)


def _masks_of(folder: Path) -> tuple[Any, dict[str, list[int]]]:
    """A function that reads one mask, and the shapes of all."""
    from safetensors import SafetensorError, safe_open

    path = folder / FILE_NAME
    if not path.is_file():
        return None, {}
    try:
        with safe_open(path, framework="pt") as opened:
            shapes = parse_json((opened.metadata() or {}).get("shapes", "{}"))
    except (SafetensorError, ValueError, OSError) as error:
        raise SympruneError(f"The mask file {path} is corrupt: {error}.") from error

    def mask(name: str) -> Tensor:
        return unpack_bits(_tensor(path, name), tuple(shapes[name]))

    return mask, shapes


def _weight(folder: Path, name: str, expert: int | None) -> Tensor | None:
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(path, framework="pt") as opened:
                if packed_name(name) in opened.keys():  # noqa: SIM118 - not a mapping
                    dense = decode(opened.get_tensor(packed_name(name)), torch.float32)
                    return dense if expert is None else dense[expert]
                if name in opened.keys():  # noqa: SIM118
                    stored = opened.get_slice(name)
                    return stored[:] if expert is None else stored[expert]
        except (SafetensorError, OSError) as error:
            raise SympruneError(f"{path} is a corrupt safetensors file: {error}.") from error
    return None


def _tensor(path: Path, name: str) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            return opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise SympruneError(f"{path} is a corrupt safetensors file: {error}.") from error


def _is_transposed(
    layer: Mapping[str, Any], layers: Sequence[Mapping[str, Any]], shapes: Mapping[str, list[int]]
) -> bool:
    """Whether the matrix is stored `[in, out]`; a square one is stored as the rest of its part."""
    for other in [layer, *(one for one in layers if one.get("part") == layer.get("part"))]:
        name = str(other["name"])
        shape = shapes.get(name) or shapes.get(name.rpartition(".")[0])
        rows, columns = other.get("rows"), other.get("columns")
        if shape and rows != columns:
            return list(shape[-2:]) == [columns, rows]
    return False


def figure(pair: Pair) -> str:
    """The whole matrix and a corner of it, weights on the left and mask on the right."""
    rows, columns = pair.keep.shape
    corner = pair.keep[:CORNER, :CORNER]
    note = f"{rows:,} output channels down, {columns:,} input channels across."
    if pair.weight is None:
        note += " The folder does not hold its weights under this name, so only the mask is shown."
    parts = [_maps(pair.weight, pair.keep, f"The whole matrix, {rows:,} × {columns:,}")]
    if corner.shape != pair.keep.shape:
        weight = None if pair.weight is None else pair.weight[:CORNER, :CORNER]
        size = " × ".join(str(n) for n in corner.shape)
        parts.append(_maps(weight, corner, f"Its first {size} weights"))
    name = escape(pair.name).replace(".", ".<wbr>")
    caption = f"{name}<small>{escape(note)}</small>"
    return f"<figure>\n<figcaption>{caption}</figcaption>\n" + "\n".join(parts) + "\n</figure>"


def _maps(weight: Tensor | None, keep: Tensor, title: str) -> str:
    shown = []
    if weight is not None:
        size = _averages(weight.abs())
        top = max(float(size.quantile(0.99)), torch.finfo(torch.float32).tiny)
        shown.append(_picture("|W| after pruning", size / top, "0", f"≥ {figure_text(top)}"))
    shown.append(_picture("The mask", _averages(keep.float()), "pruned", "kept"))
    return f'<h3>{escape(title)}</h3>\n<div class="maps">{"".join(shown)}</div>'


def _averages(matrix: Tensor) -> Tensor:
    """Averages over square blocks, as small as keep the longer side within BLOCKS of them."""
    side = math.ceil(max(matrix.shape) / BLOCKS)
    return avg_pool2d(matrix.float()[None, None], side, ceil_mode=True)[0, 0]


def _picture(label: str, values: Tensor, low: str, high: str) -> str:
    height, width = values.shape
    ramp = ", ".join(f"rgb({r} {g} {b})" for r, g, b in RAMP)
    return (
        f"<div><p>{escape(label)}</p>"
        f'<img alt="Heat map: {escape(label)}" width="{width}" height="{height}" '
        f'style="--ratio:{width / height:.4f}" src="{data_uri(values)}">'
        f'<div class="ramp"><span>{escape(low)}</span>'
        f'<i style="background:linear-gradient(to right, {ramp})"></i>'
        f"<span>{escape(high)}</span></div></div>"
    )


def data_uri(values: Tensor) -> str:
    """Values in [0, 1] as a PNG with a palette of 256 colours."""
    levels = (values.nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8).contiguous()
    height, width = levels.shape
    lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), levels], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    data = zlib.compress(lines.numpy().tobytes(), 9)
    png = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"PLTE", _palette())
    png += _chunk(b"IDAT", data) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _palette() -> bytes:
    colours = []
    for level in range(256):
        at = level / 255 * (len(RAMP) - 1)
        left = min(int(at), len(RAMP) - 2)
        pair = zip(RAMP[left], RAMP[left + 1], strict=True)
        colours += [round(a + (b - a) * (at - left)) for a, b in pair]
    return bytes(colours)
