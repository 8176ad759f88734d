"""Pairwise-masked summation: the server learns the sum of the clients' vectors and nothing else.

After Bonawitz et al., Practical Secure Aggregation, without its secret shares: every pair of
clients agrees on a seed (Diffie-Hellman in the 3072-bit group of RFC 7919), one of them adds the
stream of SHAKE-256 it gives and the other subtracts it. Numbers are fixed-point modulo 2^128 with
64 bits after the point, so the masks cancel exactly and, unlike with 64 bits, no channel's sum is
rounded in a way that could show. What this protects from: a server that follows the protocol but
looks at everything. Not from one that hands out keys of its own or claims that clients are gone.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from torch import Tensor
from torch import from_numpy as tensor_from

from symprune.errors import SympruneError

BITS = 3072
KEY_BYTES = BITS // 8
SECRET_BITS = 320
GENERATOR = 2
WORDS = 2
POINT = 64
MODULUS = 1 << 64 * WORDS


def _ffdhe_prime() -> int:
    """RFC 7919's ffdhe3072, a safe prime, from its formula:
    2^3072 - 2^3008 + (floor(2^2942 e) + 2625351) 2^64 - 1."""
    extra = 64
    term = euler = 1 << BITS - 130 + extra
    for k in range(1, 1000):
        term //= k
        euler += term
    return (1 << BITS) - (1 << BITS - 64) + ((euler >> extra) + 2625351 << 64) - 1


PRIME = _ffdhe_prime()


def new_secret() -> int:
    return secrets.randbits(SECRET_BITS) | 1 << SECRET_BITS - 1


def public_key(secret: int) -> bytes:
    return pow(GENERATOR, secret, PRIME).to_bytes(KEY_BYTES, "big")


def pair_seed(secret: int, other_key: bytes, pair: tuple[int, int]) -> bytes:
    """The seed this client shares with another one; `pair` are their numbers, in any order."""
    other = int.from_bytes(other_key, "big")
    if not 1 < other < PRIME - 1:
        raise SympruneError("A client's public key is not one.")
    shared = pow(other, secret, PRIME).to_bytes(KEY_BYTES, "big")
    return hashlib.sha256(b"symprune pair %d %d " % tuple(sorted(pair)) + shared).digest()


def mask(values: np.ndarray, number: int, seeds: Mapping[int, bytes], which: str) -> np.ndarray:
    """A client's numbers plus its part of every pair's stream; `seeds` by the other's number.

    No stream is used for two sums: it depends on `which` sum it is and on who takes part.
    """
    for other, words in _streams(values, number, seeds, which):
        values = add(values, words if number < other else negative(words))
    return values


def mask_whole(values: Tensor, number: int, seeds: Mapping[int, bytes], which: str) -> Tensor:
    """The same for whole numbers of any type, which are added up modulo 2 to their bits."""
    masked = _words(values)
    for other, words in _streams(masked, number, seeds, which):
        masked = masked + words if number < other else masked - words
    return tensor_from(masked.view(values.numpy().dtype)).view(values.shape)


def mask_fields(
    fields: Mapping[str, Tensor], number: int, seeds: Mapping[int, bytes], which: str
) -> dict[str, Tensor]:
    """Several of these at once, each behind streams of its own."""
    return {
        name: mask_whole(value, number, seeds, f"{which} {name}") for name, value in fields.items()
    }


def total_whole(masked: Iterable[Tensor]) -> Tensor:
    """The sum of all clients' masked whole numbers."""
    parts = list(masked)
    summed = _words(parts[0])
    for part in parts[1:]:
        summed = summed + _words(part)
    return tensor_from(summed.view(parts[0].numpy().dtype)).view(parts[0].shape)


def _words(values: Tensor) -> np.ndarray:
    """Whole numbers without their sign, which the sum modulo 2 to their bits gets back."""
    flat = values.contiguous().numpy().reshape(-1)
    return flat.view(np.dtype(f"u{flat.dtype.itemsize}"))


def _streams(
    values: np.ndarray, number: int, seeds: Mapping[int, bytes], which: str
) -> Iterator[tuple[int, np.ndarray]]:
    """The stream this client shares with every other one, as long and of the type of values."""
    label = f"{which} of {sorted({number, *seeds})} ".encode()
    for other, seed in seeds.items():
        stream = hashlib.shake_256(label + seed).digest(values.nbytes)
        yield other, np.frombuffer(stream, values.dtype).reshape(values.shape)


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Modulo 2^128; a number is a row of two words, the low one first."""
    low = a[:, 0] + b[:, 0]
    return np.stack([low, a[:, 1] + b[:, 1] + (low < a[:, 0])], 1)


def negative(a: np.ndarray) -> np.ndarray:
    one = np.zeros_like(a)
    one[:, 0] = 1
    return add(~a, one)


def to_fixed(values: Tensor, rests: Tensor, parties: int) -> np.ndarray:
    """Pairs of doubles as fixed-point numbers. Refused when `parties` of them could overflow."""
    limit = MODULUS // 2 // parties
    whole = []
    for value, rest in zip(values.tolist(), rests.tolist(), strict=True):
        number = (_shift(value, 2 * POINT) + _shift(rest, 2 * POINT) + (1 << POINT - 1)) >> POINT
        if not -limit < number < limit:
            raise SympruneError(f"A statistic of {value:.3g} is too large for masked summation.")
        whole.append((number % MODULUS).to_bytes(8 * WORDS, "little"))
    return np.frombuffer(b"".join(whole), np.uint64).reshape(-1, WORDS)


def from_fixed(fixed: np.ndarray) -> tuple[Tensor, Tensor]:
    """The numbers as doubles, and what rounding them to doubles lost."""
    data, size = fixed.tobytes(), 8 * WORDS
    values, rests = np.empty(len(fixed)), np.empty(len(fixed))
    for i in range(len(fixed)):
        number = int.from_bytes(data[i * size : (i + 1) * size], "little")
        number -= MODULUS if number >= MODULUS // 2 else 0
        values[i] = number / (1 << POINT)
        rests[i] = (number - _shift(values[i], POINT)) / (1 << POINT)
    return tensor_from(values), tensor_from(rests)


def as_tensor(fixed: np.ndarray) -> Tensor:
    """The words as the signed integers messages carry."""
    return tensor_from(np.ascontiguousarray(fixed).view(np.int64).copy())


def total(masked: Iterable[Tensor]) -> np.ndarray:
    """The sum of all clients' masked numbers: without the masks, which cancel."""
    words = [part.numpy().view(np.uint64) for part in masked]
    summed = words[0]
    for part in words[1:]:
        summed = add(summed, part)
    return summed


def _shift(value: float, bits: int) -> int:
    """value * 2^bits as a whole number, towards minus infinity."""
    fraction, exponent = math.frexp(value)
    whole, shift = int(fraction * (1 << 53)), exponent - 53 + bits
    return whole << shift if shift >= 0 else whole >> -shift
