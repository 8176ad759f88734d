"""Numbers behind masks: whole numbers modulo 2 to their bits, so that masks cancel exactly.

Statistics are fixed-point modulo 2^128 with 64 bits after the point, two words each: unlike with 64
bits, no channel's sum is rounded in a way that could show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor
from torch import from_numpy as tensor_from

from symprune.errors import SympruneError
from symprune.fed.secure import keys

WORDS = 2
POINT = 64
MODULUS = 1 << 64 * WORDS
WIDE = "wide"
Fields = Mapping[str, Tensor]
"""Whole numbers of any type; those called `wide` have two words each."""


def shift(fields: Fields, secret: bytes, add: bool) -> dict[str, Tensor]:
    """The fields plus or minus a stream of their own each, which the secret gives."""
    shifted = {}
    for name, value in fields.items():
        words = _words(value)
        drawn = keys.stream(keys.derive(secret, f"field {name}"), words.nbytes)
        mask = drawn.view(words.dtype).reshape(words.shape)
        shifted[name] = _tensor(_add(name, words, mask if add else _negative(name, mask)), value)
    return shifted


def digest(fields: Fields) -> bytes:
    """Of the numbers, by which the same ones are known again."""
    each = ((name.encode(), _words(value).tobytes()) for name, value in sorted(fields.items()))
    return keys.digest(b"numbers", *(part for pair in each for part in pair))


def total(parts: Iterable[Fields]) -> dict[str, Tensor]:
    """The sum of several clients' fields."""
    every = list(parts)
    summed = dict(every[0])
    for part in every[1:]:
        for name, value in part.items():
            words = _add(name, _words(summed[name]), _words(value))
            summed[name] = _tensor(words, value)
    return summed


def _words(values: Tensor) -> np.ndarray:
    """Whole numbers without their sign, which the sum modulo 2 to their bits gets back."""
    found = values.contiguous().numpy()
    return found.view(np.dtype(f"u{found.dtype.itemsize}"))


def _tensor(words: np.ndarray, like: Tensor) -> Tensor:
    return tensor_from(np.ascontiguousarray(words).view(like.numpy().dtype)).view(like.shape)


def _add(name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return add(a, b) if name == WIDE else a + b


def _negative(name: str, a: np.ndarray) -> np.ndarray:
    return negative(a) if name == WIDE else (~a + np.ones(1, a.dtype)).astype(a.dtype)


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Modulo 2^128; a number is a row of two words, the low one first."""
    low = a[:, 0] + b[:, 0]
    return np.stack([low, a[:, 1] + b[:, 1] + (low < a[:, 0])], 1)


def negative(a: np.ndarray) -> np.ndarray:
    one = np.zeros_like(a)
    one[:, 0] = 1
    return add(~a, one)


def to_fixed(values: Tensor, rests: Tensor, parties: int) -> Tensor:
    """Pairs of doubles as fixed-point numbers, in the signed words that messages carry. Refused
    when `parties` of them could overflow."""
    limit = MODULUS // 2 // parties
    whole = []
    for value, rest in zip(values.tolist(), rests.tolist(), strict=True):
        number = (_shift(value, 2 * POINT) + _shift(rest, 2 * POINT) + (1 << POINT - 1)) >> POINT
        if not -limit < number < limit:
            raise SympruneError(f"A statistic of {value:.3g} is too large for masked summation.")
        whole.append((number % MODULUS).to_bytes(8 * WORDS, "little"))
    words = np.frombuffer(bytearray(b"".join(whole)), np.int64)
    return tensor_from(words.reshape(-1, WORDS))


def from_fixed(fixed: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers as doubles, and what rounding them to doubles lost."""
    data, size = fixed.contiguous().numpy().tobytes(), 8 * WORDS
    values, rests = np.empty(len(fixed)), np.empty(len(fixed))
    for i in range(len(fixed)):
        number = int.from_bytes(data[i * size : (i + 1) * size], "little")
        number -= MODULUS if number >= MODULUS // 2 else 0
        values[i] = number / (1 << POINT)
        rests[i] = (number - _shift(values[i], POINT)) / (1 << POINT)
    return tensor_from(values), tensor_from(rests)


def _shift(value: float, bits: int) -> int:
    """value * 2^bits as a whole number, towards minus infinity."""
    fraction, exponent = math.frexp(value)
    whole, shift = int(fraction * (1 << 53)), exponent - 53 + bits
    return whole << shift if shift >= 0 else whole >> -shift
