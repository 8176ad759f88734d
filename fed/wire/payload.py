"""What crosses the wire: a tensor as bytes, in the shortest of a few lossless forms.

Forms: dense values; indices + values; bit mask + values. Indices are packed to `ceil(log2 d)` bits.
Values are raw, or, for quantised tensors, a table of the distinct values and a short code each.
`encoded_sizes` gives `len(encode(row))` for every row of a stack without making the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError
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
MAX_TABLE = 1 << 12
MAX_VALUES = 1 << 31
Shape = tuple[int, ...] | Callable[[Mapping[str, Tensor]], tuple[int, ...]]
Expected = Mapping[str, tuple[torch.dtype, Shape]]
"""Field name -> the type and shape it must have; a shape may follow from the fields before it."""


def encode(tensor: Tensor, table: bool = False) -> bytes:
    """The tensor as bytes: one byte for form and type, the shape, then the body.

    `table` allows the form with a table of distinct values, for tensors known to be quantised."""
    flat = tensor.detach().cpu().contiguous().flatten()
    check_finite(flat)
    code = DTYPES.index(tensor.dtype)
    nonzero = int(torch.count_nonzero(flat))
    sizes = _row_sizes(flat.unsqueeze(0), table)[:, 0]
    coded, form = divmod(int(sizes.argmin()), 3)
    head = bytes([code | form << 4 | coded << 6]) + _varints(tensor.dim(), *tensor.shape)
    if form == DENSE:
        return head + _encode_values(flat, bool(coded))
    mask = flat != 0
    if form == INDEXED:
        where = mask.nonzero().squeeze(1).numpy()
        body = _varints(nonzero) + _pack_integers(where, _index_bits(flat.numel()))
    else:
        body = pack_bits(mask).numpy().tobytes()
    if tensor.dtype == torch.bool:
        return head + body
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
    kind, at = _take(data, start, 1)[0], start + 1
    form, coded, code = kind >> 4 & 3, bool(kind >> 6 & 1), kind & 15
    if code >= len(DTYPES) or form > MASKED or kind >> 7:
        raise SympruneError("A payload starts with an unknown form or type.")
    dimensions, at = _read_varint(data, at)
    if dimensions > 8:
        raise SympruneError(f"A payload claims {dimensions} dimensions; at most 8 are allowed.")
    shape = []
    for _ in range(dimensions):
        size, at = _read_varint(data, at)
        shape.append(size)
    total = math.prod(shape)
    if total > max_values:
        raise SympruneError(f"A payload claims {total} values; at most {max_values} are expected.")
    dtype = DTYPES[code]
    if form == DENSE:
        values, at = _decode_values(data, at, total, dtype, coded)
        return values.view(shape), at
    if form == INDEXED:
        count, at = _read_varint(data, at)
        if count > total:
            raise SympruneError(f"A payload claims {count} of {total} values.")
        bits = _index_bits(total)
        where = _unpack_integers(_take(data, at, _bytes(count * bits)), bits, count)
        at += _bytes(count * bits)
        if count and (where[-1] >= total or (np.diff(where) <= 0).any()):
            raise SympruneError("A payload's indices are out of range or out of order.")
        index = torch.from_numpy(where)
    else:
        packed = np.frombuffer(_take(data, at, _bytes(total)), np.uint8).copy()
        at += _bytes(total)
        index = unpack_bits(torch.from_numpy(packed), (total,)).nonzero().squeeze(1)
    flat = torch.zeros(total, dtype=dtype)
    if dtype == torch.bool:
        flat[index] = True
        return flat.view(shape), at
    values, at = _decode_values(data, at, index.numel(), dtype, coded)
    flat[index] = values
    return flat.view(shape), at


def encoded_sizes(rows: Tensor, table: bool = False) -> Tensor:
    """`len(encode(row))` for every row of a stack `[C, ...]`, as int64 `[C]`."""
    sizes = _row_sizes(rows.detach().reshape(rows.shape[0], -1), table).min(0)
    return torch.from_numpy(sizes + 1 + _varint_size(rows.dim() - 1, *rows.shape[1:]))


def _row_sizes(flat: Tensor, table: bool) -> np.ndarray:
    table = table and flat.dtype != torch.bool
    nonzero = count_true(flat != 0).numpy()
    tables = _distinct_counts(flat) if table else None
    return _body_sizes(flat.shape[1], nonzero, _value_bits(flat.dtype), tables)


def encode_message(fields: Mapping[str, Tensor], table: frozenset[str] = frozenset()) -> bytes:
    """Named tensors as one string of bytes, in the order of the mapping."""
    parts = [_varints(len(fields))]
    for name, tensor in fields.items():
        parts.append(_varints(len(name.encode())) + name.encode() + encode(tensor, name in table))
    return b"".join(parts)


def decode_message(data: bytes, max_values: int = MAX_VALUES) -> dict[str, Tensor]:
    """The named tensors of `encode_message`; `max_values` is for all of them together."""
    fields: dict[str, Tensor] = {}
    count, at = _read_varint(data, 0)
    for _ in range(count):
        length, at = _read_varint(data, at)
        try:
            name = _take(data, at, length).decode()
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
    length, at = _read_varint(data, at)
    if _take(data, at, length) != name.encode():
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
    return decode_field(data, _read_varint(data, 0)[1], name, dtype, shape)[0]


def decode_as(data: bytes, expected: Expected) -> dict[str, Tensor]:
    """The fields of a message that must be exactly the expected ones, in their order."""
    count, at = _read_varint(data, 0)
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
    named = sum(_varint_size(len(name.encode())) + len(name.encode()) for name in names)
    return _varint_size(len(names)) + named


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
    index = _bytes(nonzero * _index_bits(total)) + _varint_sizes(nonzero)
    mask = np.full_like(nonzero, _bytes(total))
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
    size = _varint_sizes(distinct) + distinct * value_bytes + _bytes(count * bits)
    return np.where(distinct > MAX_TABLE, np.iinfo(np.int64).max // 2, size)


def _distinct_counts(rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """How many different values each row has, and how many that are not zero."""
    ordered = rows.sort(1).values
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return new.sum(1).numpy(), (new & (ordered != 0)).sum(1).numpy()


def _encode_values(values: Tensor, coded: bool) -> bytes:
    if not coded:
        return _raw(values)
    table, codes = values.unique(sorted=True, return_inverse=True)
    packed = _pack_integers(codes.numpy(), _code_bits(table.numel()))
    return _varints(table.numel()) + _raw(table) + packed


def _decode_values(
    data: bytes, at: int, count: int, dtype: torch.dtype, coded: bool
) -> tuple[Tensor, int]:
    if not coded:
        size = _bytes(count * _value_bits(dtype))
        return _from_raw(_take(data, at, size), count, dtype), at + size
    entries, at = _read_varint(data, at)
    if entries > MAX_TABLE:
        raise SympruneError(f"A payload's table claims {entries} entries.")
    size = entries * _value_bits(dtype) // 8
    table, at = _from_raw(_take(data, at, size), entries, dtype), at + size
    bits = _code_bits(entries)
    codes = _unpack_integers(_take(data, at, _bytes(count * bits)), bits, count)
    if count and codes.max() >= entries:
        raise SympruneError("A payload refers to an entry its table does not have.")
    return table[torch.from_numpy(codes)], at + _bytes(count * bits)


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


def _pack_integers(values: np.ndarray, bits: int) -> bytes:
    """Non-negative integers, `bits` bits each, lowest bit first."""
    planes = (values[:, None] >> np.arange(bits)) & 1
    return np.packbits(planes.astype(np.uint8).ravel(), bitorder="little").tobytes()


def _unpack_integers(data: bytes, bits: int, count: int) -> np.ndarray:
    flat = np.unpackbits(np.frombuffer(data, np.uint8), count=count * bits, bitorder="little")
    return (flat.reshape(count, bits).astype(np.int64) << np.arange(bits)).sum(1)


def _take(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise SympruneError("A payload ends before its last value.")
    return data[at : at + size]


def _varints(*numbers: int) -> bytes:
    """Seven bits a byte, the highest bit set on all but the last."""
    out = bytearray()
    for number in numbers:
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 63, 7):
        byte, at = _take(data, at, 1)[0], at + 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise SympruneError("A payload holds a number of more than 63 bits.")


def _varint_size(*numbers: int) -> int:
    return sum(max(1, (int(number).bit_length() + 6) // 7) for number in numbers)


def _varint_sizes(numbers: np.ndarray) -> np.ndarray:
    if not numbers.size or numbers.max() < 128:
        return np.ones_like(numbers)
    return np.array([_varint_size(number) for number in numbers.tolist()])


def _value_bits(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else 8 * dtype.itemsize


def _index_bits(total: int) -> int:
    return max(1, (max(total, 1) - 1).bit_length())


def _code_bits(entries: int) -> int:
    return (max(entries, 1) - 1).bit_length()


def _bytes(bits: Any) -> Any:
    """Bytes that hold so many bits, of a number or an array of numbers."""
    return (bits + 7) // 8
