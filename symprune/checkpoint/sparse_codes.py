"""A sparse tensor as its kept values and where they are: one bit a weight, or less for N:M.

Kept is what is not +0 bit for bit, so that decoding gives back every byte. Under an N:M pattern the
places of a group are one of C(M, N) combinations and cost ceil(log2 C(M, N)) bits: 3 for the 4
weights of 2:4, 7 for the 8 of 4:8. A group with fewer than N values keeps some zeros. Knows arrays
only.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations

import numpy as np

INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
PATTERNS = ("2:4", "4:8", "1:4", "1:2")
BITMASK = "mask"
NO_CODE = 255


def nonzero(data: np.ndarray) -> np.ndarray:
    """Where an array of integers, the bits of some numbers, is not zero."""
    return data != 0


def choose(kept: np.ndarray, item: int) -> tuple[str, int, int] | None:
    """(how, values, bytes of places) of the smallest encoding, None if none is smaller than the
    tensor; `how` is `mask`, or a pattern with `T` where it holds along the axis before the last."""
    size, count = kept.size, int(np.count_nonzero(kept))
    best = (BITMASK, count, (size + 7) // 8)
    if kept.ndim >= 2 and 0 < count < size:
        for how in (*PATTERNS, *(f"{pattern}T" for pattern in PATTERNS)):
            n, m, bits = _parse(how)
            oriented = _orient(kept, how)
            if oriented.shape[-1] % m or size // m * n * item >= best[1] * item + best[2]:
                continue
            some = oriented[(slice(8),) * (oriented.ndim - 1)]  # most patterns fail at once
            if _fullest(some, m) <= n and _fullest(oriented, m) <= n:
                found = (how, size // m * n, (size // m * bits + 7) // 8)
                best = min(best, found, key=lambda code: code[1] * item + code[2])
    return best if best[1] * item + best[2] < size * item else None


def encode(data: np.ndarray, how: str) -> tuple[np.ndarray, np.ndarray]:
    """(values, places as bytes) of an array of integers."""
    if how == BITMASK:
        kept = nonzero(data).reshape(-1)
        return data.reshape(-1)[kept], np.packbits(kept, bitorder="little")
    _, m, bits = _parse(how)
    codes_of, masks = _tables(how.removesuffix("T"))
    groups = _orient(data, how).reshape(-1, m)
    codes = codes_of[_patterns(nonzero(groups))]
    spread = (codes[:, None] >> np.arange(bits, dtype=np.uint8)) & 1
    return groups[masks[codes]], np.packbits(spread.reshape(-1), bitorder="little")


def decode(values: np.ndarray, places: np.ndarray, shape: tuple[int, ...], how: str) -> np.ndarray:
    """The array `encode` was given; `ValueError` when the parts do not fit together."""
    size = math.prod(shape)
    if how == BITMASK:
        data = np.zeros(size, values.dtype)
        kept = np.unpackbits(places, count=size, bitorder="little").view(bool)
        data[kept] = values
        return data.reshape(shape)
    _, m, bits = _parse(how)
    _, masks = _tables(how.removesuffix("T"))
    turned = (*shape[:-2], shape[-1], shape[-2]) if how.endswith("T") else shape
    spread = np.unpackbits(places, count=size // m * bits, bitorder="little").reshape(-1, bits)
    codes = (spread << np.arange(bits, dtype=np.uint8)).sum(1, dtype=np.uint8)
    if codes.size and codes.max() >= len(masks):
        raise ValueError("a group has an impossible place")
    data = np.zeros((size // m, m), values.dtype)
    data[masks[codes]] = values
    data = data.reshape(turned)
    return data.swapaxes(-1, -2) if how.endswith("T") else data


def _parse(how: str) -> tuple[int, int, int]:
    """n, m, and the bits a group's places take."""
    n, m = (int(part) for part in how.removesuffix("T").split(":"))
    return n, m, max(1, (math.comb(m, n) - 1).bit_length())


def _orient(data: np.ndarray, how: str) -> np.ndarray:
    return data.swapaxes(-1, -2) if how.endswith("T") else data


def _fullest(kept: np.ndarray, m: int) -> int:
    """The most any group keeps."""
    counts = np.add.reduceat(kept, np.arange(0, kept.shape[-1], m), axis=-1, dtype=np.uint8)
    return int(counts.max(initial=0))


def _patterns(kept: np.ndarray) -> np.ndarray:
    """Each row of at most eight bits as a number, lowest bit first."""
    return np.packbits(kept, axis=1, bitorder="little")[:, 0]


@cache
def _tables(pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Bits of a group -> code (with zeros kept in the first free places where there are fewer than
    n), and code -> which places."""
    n, m, _ = _parse(pattern)
    places = list(combinations(range(m), n))
    numbers = {sum(1 << place for place in chosen): code for code, chosen in enumerate(places)}
    codes = np.full(2**m, NO_CODE, np.uint8)
    for number in range(2**m):
        full = number
        for place in range(m):
            if full.bit_count() < n:
                full |= 1 << place
        codes[number] = numbers.get(full, NO_CODE)
    masks = np.zeros((len(places), m), bool)
    for code, chosen in enumerate(places):
        masks[code, list(chosen)] = True
    return codes, masks
