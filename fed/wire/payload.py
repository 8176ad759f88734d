"""What crosses the wire: a tensor as bytes, in the shortest of a few lossless forms.

Forms: dense values; indices + values; bit mask + values. Indices are packed to `ceil(log2 d)` bits.
Values are raw, or, for quantised tensors, a table of the distinct values and a short code each, or
whole numbers of 8 or 4 bits on a grid.
`encoded_sizes` gives `len(encode(row))` for every row of a stack without making the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.wire.bits import (
    bytes_for,
    index_bits,
    pack_integers,
    read_varint,
    take,
    unpack_integers,
    varint_size,
    varint_sizes,
    varints,
)
from symprune.fed.wire.grid import Grid, decode_on_grid, encode_on_grid, grid_sizes
from symprune.masks import count_true, pack_bits, unpack_bits

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
)
DENSE, INDEXED, MASKED = range(3)
GRIDDED = 1 << 7
MAX_TABLE = 1 << 12
MAX_VALUES = 1 << 31
Shape = tuple[int, ...] | Callable[[Mapping[str, Tensor]], tuple[int, ...]]
Expected = Mapping[str, tuple[torch.dtype, Shape]]
"""Field name -> the type and shape it must have; a shape may follow from the fields before it."""


def encode(tensor: Tensor, table: bool = False, grid: Grid | None = None) -> bytes:
    """The tensor as bytes: one byte for form and type, the shape, then the body.

    `table` allows the form with a table of distinct values, for tensors known to be quantised;
    `grid` is the grid of one row that all values are on."""
    flat = tensor.detach().cpu().contiguous().flatten()
    check_finite(flat)
    code = DTYPES.index(tensor.dtype)
    nonzero = int(torch.count_nonzero(flat))
    sizes = _row_sizes(flat.unsqueeze(0), table, grid)[:, 0]
    coded, form = divmod(int(sizes.argmin()), 3)
    grid, gridded = (grid, GRIDDED) if coded and grid is not None else (None, 0)
    kind = code | form << 4 | (gridded or coded << 6)
    head = bytes([kind]) + varints(tensor.dim(), *tensor.shape)
    if form == DENSE:
        return head + _encode_values(flat, bool(coded), grid)
    mask = flat != 0
    if form == INDEXED:
        where = mask.nonzero().squeeze(1).numpy()
        body = varints(nonzero) + pack_integers(where, index_bits(flat.numel()))
    else:
        body = pack_bits(mask).numpy().tobytes()
    if tensor.dtype == torch.bool:
        return head + body
    if grid is not None:
        places = mask.nonzero().squeeze(1)
        return head + body + encode_on_grid(flat[mask], places, flat.numel(), grid)
    return head + body + _encode_values(flat[mask], bool(coded))


def decode(data: bytes, max_values: int = MAX_VALUES) -> Tensor:
    """The tensor `encode` made these bytes from. Bytes that lie about their size are refused."""
    tensor, end = decode_at(data, 0, max_values)
    if end != len(data):
        raise SympruneError(f"A payload has {len(data) - end} bytes too many.")
    return tensor


def decode_at(data: bytes, start: int, max_values: int = MAX_VALUES) -> tuple[Tensor, int]:
    """One tensor that begins at `start`, and where it ends. Nothing larger than `max_values`
    entries is allocated, whatever the header says."""
    kind, at = take(data, start, 1)[0], start + 1
    form, coded, code = kind >> 4 & 3, bool(kind >> 6 & 1), kind & 15
    gridded = bool(kind & GRIDDED)
    if code >= len(DTYPES) or form > MASKED or (coded and gridded):
        raise SympruneError("A payload starts with an unknown form or type.")
    dimensions, at = read_varint(data, at)
    if dimensions > 8:
        raise SympruneError(f"A payload claims {dimensions} dimensions; at most 8 are allowed.")
    shape = []
    for _ in range(dimensions):
        size, at = read_varint(data, at)
        shape.append(size)
    total = math.prod(shape)
    spread = math.prod(max(size, 1) for size in shape)  # a zero hides how large the others are
    if total > max_values or spread > MAX_VALUES:
        claimed = total or spread
        raise SympruneError(
            f"A payload claims {claimed} values; at most {max_values} are expected."
        )
    dtype = DTYPES[code]
    if form == DENSE and gridded:
        values, at = decode_on_grid(data, at, torch.arange(total), total, dtype)
        check_finite(values)
        return values.view(shape), at
    if form == DENSE:
        values, at = _decode_values(data, at, total, dtype, coded)
        return values.view(shape), at
    if form == INDEXED:
        count, at = read_varint(data, at)
        if count > total:
            raise SympruneError(f"A payload claims {count} of {total} values.")
        bits = index_bits(total)
        where = unpack_integers(take(data, at, bytes_for(count * bits)), bits, count)
        at += bytes_for(count * bits)
        if count and (where[-1] >= total or (np.diff(where) <= 0).any()):
            raise SympruneError("A payload's indices are out of range or out of order.")
        index = torch.from_numpy(where)
    else:
        packed = np.frombuffer(take(data, at, bytes_for(total)), np.uint8).copy()
        at += bytes_for(total)
        index = unpack_bits(torch.from_numpy(packed), (total,)).nonzero().squeeze(1)
    flat = torch.zeros(total, dtype=dtype)
    if dtype == torch.bool:
        flat[index] = True
        return flat.view(shape), at
    if gridded:
        values, at = decode_on_grid(data, at, index, total, dtype)
        check_finite(values)
    else:
        values, at = _decode_values(data, at, index.numel(), dtype, coded)
    flat[index] = values
    return flat.view(shape), at


def encoded_sizes(rows: Tensor, table: bool = False, grid: Grid | None = None) -> Tensor:
    """`len(encode(row))` for every row of a stack `[C, ...]`, as int64 `[C]`."""
    sizes = _row_sizes(rows.detach().reshape(rows.shape[0], -1), table, grid).min(0)
    return torch.from_numpy(sizes + 1 + varint_size(rows.dim() - 1, *rows.shape[1:]))


def _row_sizes(flat: Tensor, table: bool, grid: Grid | None = None) -> np.ndarray:
    table = table and flat.dtype != torch.bool and grid is None
    nonzero, d = count_true(flat != 0).cpu().numpy(), flat.shape[1]
    tables = _distinct_counts(flat) if table else None
    sizes = _body_sizes(d, nonzero, _value_bits(flat.dtype), tables)
    if grid is None:
        return sizes
    everywhere, some = grid_sizes(grid, d, np.full_like(nonzero, d)), grid_sizes(grid, d, nonzero)
    places = bytes_for(nonzero * index_bits(d)) + varint_sizes(nonzero)
    return np.concatenate([sizes, np.stack([everywhere, places + some, bytes_for(d) + some])])


def encode_message(
    fields: Mapping[str, Tensor],
    table: frozenset[str] = frozenset(),
    grids: Mapping[str, Grid] | None = None,
) -> bytes:
    """Named tensors as one string of bytes, in the order of the mapping."""
    parts = [varints(len(fields))]
    for name, tensor in fields.items():
        body = encode(tensor, name in table, (grids or {}).get(name))
        parts.append(varints(len(name.encode())) + name.encode() + body)
    return b"".join(parts)


def decode_message(data: bytes, max_values: int = MAX_VALUES) -> dict[str, Tensor]:
    """The named tensors of `encode_message`; `max_values` is for all of them together."""
    fields: dict[str, Tensor] = {}
    count, at = read_varint(data, 0)
    for _ in range(count):
        length, at = read_varint(data, at)
        try:
            name = take(data, at, length).decode()
        except UnicodeDecodeError:
            raise SympruneError("A message has a field whose name is not text.") from None
        fields[name], at = decode_at(data, at + length, max_values)
        max_values -= fields[name].numel()
    if at != len(data) or len(fields) != count:
        raise SympruneError("A message has bytes too many or a field twice.")
    return fields


def decode_field(
    data: bytes, at: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> tuple[Tensor, int]:
    """The field at `at`, which must have this name, type and shape, and where it ends. No more than
    the shape's values is allocated, whatever the bytes say."""
    length, at = read_varint(data, at)
    if take(data, at, length) != name.encode():
        raise SympruneError(f"A message lacks the field {name!r} where it belongs.")
    tensor, at = decode_at(data, at + length, math.prod(shape))
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise SympruneError(
            f"The field {name!r} of a message is {tensor.dtype} {tuple(tensor.shape)}, "
            f"not {dtype} {tuple(shape)}."
        )
    return tensor, at


def first_field(data: bytes, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The field a message starts with; the rest is not looked at."""
    return decode_field(data, read_varint(data, 0)[1], name, dtype, shape)[0]


def decode_as(data: bytes, expected: Expected) -> dict[str, Tensor]:
    """The fields of a message that must be exactly the expected ones, in their order."""
    count, at = read_varint(data, 0)
    if count != len(expected):
        raise SympruneError(f"A message has {count} fields, not {len(expected)}.")
    fields: dict[str, Tensor] = {}
    for name, (dtype, shape) in expected.items():
        known = shape(fields) if callable(shape) else shape
        fields[name], at = decode_field(data, at, name, dtype, known)
    if at != len(data):
        raise SympruneError(f"A message has {len(data) - at} bytes too many.")
    return fields


def message_overhead(names: list[str]) -> int:
    """Bytes of a message that are not its tensors: the field count and the names."""
    named = sum(varint_size(len(name.encode())) + len(name.encode()) for name in names)
    return varint_size(len(names)) + named


def is_finite(values: Tensor) -> bool:
    return not values.is_floating_point() or bool(torch.isfinite(values).all())


def check_finite(values: Tensor, what: str = "A payload") -> None:
    """Refuse NaN and infinity: they would spread to every client."""
    if not is_finite(values):
        raise SympruneError(f"{what} holds values that are not finite.")


def _body_sizes(
    total: int, nonzero: np.ndarray, value_bits: int, tables: tuple[np.ndarray, np.ndarray] | None
) -> np.ndarray:
    """Bytes of the body in every form `[6 or 3, C]`: dense, indexed, masked; raw, then coded.
    `tables` counts the distinct values of each row, all and without zero."""
    index = bytes_for(nonzero * index_bits(total)) + varint_sizes(nonzero)
    mask = np.full_like(nonzero, bytes_for(total))
    if value_bits == 1:  # booleans: positions say it all
        return np.stack([mask, index, mask])
    dense = np.full_like(nonzero, total)
    value_bytes = value_bits // 8
    raw = [dense * value_bytes, index + nonzero * value_bytes, mask + nonzero * value_bytes]
    if tables is None:
        return np.stack(raw)
    coded = [
        _coded_sizes(dense, value_bytes, tables[0]),
        index + _coded_sizes(nonzero, value_bytes, tables[1]),
        mask + _coded_sizes(nonzero, value_bytes, tables[1]),
    ]
    return np.stack(raw + coded)


def _coded_sizes(count: np.ndarray, value_bytes: int, distinct: np.ndarray) -> np.ndarray:
    bits = np.array([_code_bits(int(entries)) for entries in distinct])
    size = varint_sizes(distinct) + distinct * value_bytes + bytes_for(count * bits)
    return np.where(distinct > MAX_TABLE, np.iinfo(np.int64).max // 2, size)


def _distinct_counts(rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """How many different values each row has, and how many that are not zero."""
    ordered = rows.sort(1).values
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return new.sum(1).cpu().numpy(), (new & (ordered != 0)).sum(1).cpu().numpy()


def _encode_values(values: Tensor, coded: bool, grid: Grid | None = None) -> bytes:
    """All values of a tensor, or those at the places that were said before."""
    if grid is not None:
        return encode_on_grid(values, torch.arange(values.numel()), values.numel(), grid)
    if not coded:
        return _raw(values)
    table, codes = values.unique(sorted=True, return_inverse=True)
    packed = pack_integers(codes.numpy(), _code_bits(table.numel()))
    return varints(table.numel()) + _raw(table) + packed


def _decode_values(
    data: bytes, at: int, count: int, dtype: torch.dtype, coded: bool
) -> tuple[Tensor, int]:
    if not coded:
        size = bytes_for(count * _value_bits(dtype))
        return _from_raw(take(data, at, size), count, dtype), at + size
    entries, at = read_varint(data, at)
    if entries > MAX_TABLE:
        raise SympruneError(f"A payload's table claims {entries} entries.")
    size = entries * _value_bits(dtype) // 8
    table, at = _from_raw(take(data, at, size), entries, dtype), at + size
    bits = _code_bits(entries)
    codes = unpack_integers(take(data, at, bytes_for(count * bits)), bits, count)
    if count and codes.max() >= entries:
        raise SympruneError("A payload refers to an entry its table does not have.")
    return table[torch.from_numpy(codes)], at + bytes_for(count * bits)


def _raw(values: Tensor) -> bytes:
    if values.dtype == torch.bool:
        return pack_bits(values).numpy().tobytes()
    if values.dtype == torch.bfloat16:
        values = values.view(torch.int16)
    return values.contiguous().numpy().tobytes()


def _from_raw(data: bytes, count: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return unpack_bits(torch.from_numpy(np.frombuffer(data, np.uint8).copy()), (count,))
    stored = torch.int16 if dtype == torch.bfloat16 else dtype
    if not count:
        return torch.zeros(0, dtype=dtype)
    values = torch.frombuffer(bytearray(data), dtype=stored).view(dtype)
    check_finite(values)
    return values


def _value_bits(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else 8 * dtype.itemsize


def _code_bits(entries: int) -> int:
    return (max(entries, 1) - 1).bit_length()
