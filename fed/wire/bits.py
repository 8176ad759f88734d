"""Whole numbers as bytes: packed to so many bits each, or seven bits a byte."""

from __future__ import annotations

from typing import Any

import numpy as np

from symprune.errors import SympruneError


def pack_integers(values: np.ndarray, bits: int) -> bytes:
    """Non-negative integers, `bits` bits each, lowest bit first."""
    planes = (values[:, None] >> np.arange(bits)) & 1
    return np.packbits(planes.astype(np.uint8).ravel(), bitorder="little").tobytes()


def unpack_integers(data: bytes, bits: int, count: int) -> np.ndarray:
    flat = np.unpackbits(np.frombuffer(data, np.uint8), count=count * bits, bitorder="little")
    return (flat.reshape(count, bits).astype(np.int64) << np.arange(bits)).sum(1)


def take(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise SympruneError("A payload ends before its last value.")
    return data[at : at + size]


def varints(*numbers: int) -> bytes:
    """Seven bits a byte, the highest bit set on all but the last."""
    out = bytearray()
    for number in numbers:
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        out.append(number)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 63, 7):
        byte, at = take(data, at, 1)[0], at + 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise SympruneError("A payload holds a number of more than 63 bits.")


def varint_size(*numbers: int) -> int:
    return sum(max(1, (int(number).bit_length() + 6) // 7) for number in numbers)


def varint_sizes(numbers: np.ndarray) -> np.ndarray:
    if not numbers.size or numbers.max() < 128:
        return np.ones_like(numbers)
    return np.array([varint_size(number) for number in numbers.tolist()])


def index_bits(total: int) -> int:
    return max(1, (max(total, 1) - 1).bit_length())


def bytes_for(bits: Any) -> Any:
    """Bytes that hold so many bits, of a number or an array of numbers."""
    return (bits + 7) // 8
