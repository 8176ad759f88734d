"""Compressors and their constants (EF-BV: thesis chapter 2, definitions 2.2.1-2.2.5, appendix A).

A compressor is in C(eta, omega) when `||E C(x) - x|| <= eta ||x||` and
`E||C(x) - E C(x)||^2 <= omega ||x||^2`. Each is a small value: `compress(x, random)` works along
the last dimension (a stack of rows is a stack of clients), `constants(d)` gives eta and omega.
Lengths `k` may be a count or, below 1, a fraction of d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.randomness import Random, uniform_like
from symprune.fed.wire.grid import BLOCK, EXACT, LARGEST, Grid, fit_grid, round_to
from symprune.fed.wire.parcel import Sent
from symprune.masks import keep_largest


@dataclass(frozen=True)
class CompressionConstants:
    """Relative bias `eta`, variance `omega`, and `moment`: `E||C(x)||^2 <= moment ||x||^2`."""

    eta: float
    omega: float
    moment: float

    @property
    def alpha(self) -> float | None:
        """C is in B(alpha), `E||C(x)-x||^2 <= (1-alpha)||x||^2`; None when not contractive."""
        alpha = 1 - self.eta**2 - self.omega
        return alpha if alpha > 0 else None

    @property
    def best_scaling(self) -> float:
        """`lam* = min((1-eta) / ((1-eta)^2 + omega), 1)`: makes `lam*C` most contractive."""
        return best_scaling(self.eta, self.omega)

    def scaled(self, lam: float) -> CompressionConstants:
        """The constants of `lam*C`, lam in (0, 1]."""
        eta = 1 - lam + lam * self.eta
        return CompressionConstants(eta, lam**2 * self.omega, lam**2 * self.moment)


def best_scaling(eta: float, omega: float) -> float:
    return min((1 - eta) / ((1 - eta) ** 2 + omega), 1.0)


@dataclass(frozen=True)
class Compressor:
    """Base of all compressors; by itself the identity."""

    quantises = False  # few distinct values: the payload may send a table and codes
    deterministic = True

    def compress(self, x: Tensor, random: Random) -> Tensor:
        return x

    def sent(self, x: Tensor, random: Random) -> Sent:
        """`compress(x)`, a row per client, as a field of a message."""
        bits = self.paper_bits(x.shape[-1])
        return Sent(self.compress(x, random), bits, self.quantises)

    def constants(self, d: int) -> CompressionConstants:
        return CompressionConstants(0.0, 0.0, 1.0)

    def coordinates(self, d: int) -> int:
        """How many coordinates are sent."""
        return d

    def paper_bits(self, d: int) -> int:
        """What the papers count: 32 bits a value, indices free."""
        return 32 * self.coordinates(d)


class Identity(Compressor):
    """C(x) = x."""


@dataclass(frozen=True)
class TopK(Compressor):
    """The k entries of largest magnitude, unchanged; ties go to the higher index."""

    k: float

    def compress(self, x: Tensor, random: Random) -> Tensor:
        return top_k(x, count(self.k, x.shape[-1]))

    def constants(self, d: int) -> CompressionConstants:
        return CompressionConstants(math.sqrt(1 - count(self.k, d) / d), 0.0, 1.0)

    def coordinates(self, d: int) -> int:
        return count(self.k, d)


@dataclass(frozen=True)
class RandK(Compressor):
    """k entries chosen uniformly, times d/k (unbiased), or, `scaled`, unchanged (contractive)."""

    k: float
    scaled: bool = False
    deterministic = False

    def compress(self, x: Tensor, random: Random) -> Tensor:
        d = x.shape[-1]
        k = count(self.k, d)
        kept = torch.where(keep_largest(uniform_like(x, random), k), x, 0)
        return kept if self.scaled else kept * (d / k)

    def constants(self, d: int) -> CompressionConstants:
        k = count(self.k, d)
        if self.scaled:
            return CompressionConstants(1 - k / d, (k / d) * (1 - k / d), k / d)
        return CompressionConstants(0.0, d / k - 1, d / k)

    def coordinates(self, d: int) -> int:
        return count(self.k, d)


@dataclass(frozen=True)
class Mix(Compressor):
    """mix-(k, k'): top-k, and k' of the other entries chosen uniformly, all unchanged."""

    k: float
    k_random: float
    deterministic = False

    def compress(self, x: Tensor, random: Random) -> Tensor:
        k, k_random = self._counts(x.shape[-1])
        top = keep_largest(x.abs(), k)
        chance = torch.where(top, 2.0, uniform_like(x, random))
        return torch.where(keep_largest(chance, k + k_random), x, 0)

    def constants(self, d: int) -> CompressionConstants:
        k, k_random = self._counts(d)
        left = d - k - k_random
        if left == 0:
            return CompressionConstants(0.0, 0.0, 1.0)
        omega = k_random * left / ((d - k) * d)
        return CompressionConstants(left / math.sqrt((d - k) * d), omega, 1.0)

    def coordinates(self, d: int) -> int:
        return sum(self._counts(d))

    def _counts(self, d: int) -> tuple[int, int]:
        k, k_random = count(self.k, d), count(self.k_random, d)
        if k + k_random > d:
            raise SympruneError(f"mix-({k},{k_random}) keeps more than the {d} entries there are.")
        return k, k_random


@dataclass(frozen=True)
class Comp(Compressor):
    """comp-(k, k'): of the top-k' entries, k chosen uniformly, times k'/k."""

    k: float
    k_top: float
    deterministic = False

    def compress(self, x: Tensor, random: Random) -> Tensor:
        k, k_top = self._counts(x.shape[-1])
        top = keep_largest(x.abs(), k_top)
        chance = torch.where(top, uniform_like(x, random), -1.0)
        return torch.where(keep_largest(chance, k), x * (k_top / k), 0)

    def constants(self, d: int) -> CompressionConstants:
        k, k_top = self._counts(d)
        return CompressionConstants(math.sqrt(1 - k_top / d), (k_top - k) / k, k_top / k)

    def coordinates(self, d: int) -> int:
        return self._counts(d)[0]

    def _counts(self, d: int) -> tuple[int, int]:
        k, k_top = count(self.k, d), count(self.k_top, d)
        if k > k_top:
            raise SympruneError(f"comp-({k},{k_top}) needs k <= k'.")
        return k, k_top


@dataclass(frozen=True)
class Natural(Compressor):
    """Natural compression: round |x| = 2^e (1+f) to 2^(e+1) with probability f, else 2^e."""

    quantises = True
    deterministic = False

    def compress(self, x: Tensor, random: Random) -> Tensor:
        mantissa, exponent = torch.frexp(x.abs())  # |x| = mantissa 2^exponent, mantissa in [1/2, 1)
        up = uniform_like(x, random) < 2 * mantissa.double() - 1
        power = torch.ldexp(torch.ones_like(x), exponent - 1 + up.to(exponent.dtype))
        return torch.where(x == 0, 0, power * x.sign())

    def constants(self, d: int) -> CompressionConstants:
        return CompressionConstants(0.0, 1 / 8, 9 / 8)

    def paper_bits(self, d: int) -> int:
        return 9 * d  # sign and exponent


@dataclass(frozen=True)
class QSGD(Compressor):
    """Each entry to one of `levels` multiples of ||x||/levels, rounding at random, unbiased."""

    levels: int
    quantises = True
    deterministic = False

    def __post_init__(self) -> None:
        if self.levels < 1:
            raise SympruneError(f"QSGD needs at least one level, not {self.levels}.")

    def compress(self, x: Tensor, random: Random) -> Tensor:
        norm = x.norm(dim=-1, keepdim=True)
        place = self.levels * x.abs() / torch.where(norm > 0, norm, 1)
        level = place.floor()
        level = level + (uniform_like(x, random) < (place - level).double())
        return x.sign() * level * (norm / self.levels)

    def constants(self, d: int) -> CompressionConstants:
        omega = min(d / self.levels**2, math.sqrt(d) / self.levels)
        return CompressionConstants(0.0, omega, 1 + omega)

    def paper_bits(self, d: int) -> int:
        return 32 + d * (1 + self.levels.bit_length())


@dataclass(frozen=True)
class WholeNumbers(Compressor):
    """Whole numbers of 8 or 4 bits times a step for every 64 values, rounding at random, unbiased.

    A value is off by a variance of step^2/4 at most, and a step is the largest of 64 values over
    127 or 7, rounded up to a bfloat16."""

    bits: int
    deterministic = False

    def compress(self, x: Tensor, random: Random) -> Tensor:
        return self._round(x, random)[0]

    def sent(self, x: Tensor, random: Random) -> Sent:
        rounded, grid = self._round(x, random)
        if x.dtype not in EXACT:
            return Sent(rounded, self.paper_bits(x.shape[-1]))
        return Sent(rounded, self.paper_bits(x.shape[-1]), grid=grid)

    def constants(self, d: int) -> CompressionConstants:
        step = (1 + 2**-7) / LARGEST[self.bits]
        block = min(d, BLOCK)
        omega = min(block * step**2 / 4, math.sqrt(block) * step)
        return CompressionConstants(0.0, omega, 1 + omega)

    def paper_bits(self, d: int) -> int:
        return self.bits * d + 16 * -(-d // BLOCK)

    def _round(self, x: Tensor, random: Random) -> tuple[Tensor, Grid]:
        uniform = uniform_like(x, random)
        rows, chances = x.reshape(-1, x.shape[-1]), uniform.reshape(-1, x.shape[-1])
        grid = fit_grid(rows, self.bits)
        return round_to(rows, grid, chances).view(x.shape), grid


@dataclass(frozen=True)
class Scaled(Compressor):
    """lam * C, with lam in (0, 1]; `lam=None` takes the best one."""

    inner: Compressor
    lam: float | None = None

    def compress(self, x: Tensor, random: Random) -> Tensor:
        return self._factor(x.shape[-1]) * self.inner.compress(x, random)

    def constants(self, d: int) -> CompressionConstants:
        return self.inner.constants(d).scaled(self._factor(d))

    def coordinates(self, d: int) -> int:
        return self.inner.coordinates(d)

    def paper_bits(self, d: int) -> int:
        return self.inner.paper_bits(d)

    def _factor(self, d: int) -> float:
        return self.inner.constants(d).best_scaling if self.lam is None else self.lam

    @property
    def quantises(self) -> bool:  # type: ignore[override]
        return self.inner.quantises

    @property
    def deterministic(self) -> bool:  # type: ignore[override]
        return self.inner.deterministic


@dataclass(frozen=True)
class Chain(Compressor):
    """`outer(inner(x))` with an unbiased outer one, for instance values of a top-k quantised.

    `E||outer(y)-y||^2 <= omega2 ||y||^2` adds `omega2 * moment1` to the inner variance."""

    inner: Compressor
    outer: Compressor
    deterministic = False

    def __post_init__(self) -> None:
        if self.outer.constants(8).eta > 0:
            raise SympruneError("The outer compressor of a chain must be unbiased.")
        if self.outer.coordinates(8) < 8:
            raise SympruneError("The outer compressor of a chain must be a quantiser.")

    def compress(self, x: Tensor, random: Random) -> Tensor:
        return self.outer.compress(self.inner.compress(x, random), random)

    def sent(self, x: Tensor, random: Random) -> Sent:
        last = self.outer.sent(self.inner.compress(x, random), random)
        return replace(last, bits=self.paper_bits(x.shape[-1]))

    def constants(self, d: int) -> CompressionConstants:
        first = self.inner.constants(d)
        omega = self.outer.constants(self.inner.coordinates(d)).omega
        moment = (1 + omega) * first.moment
        return CompressionConstants(first.eta, first.omega + omega * first.moment, moment)

    def coordinates(self, d: int) -> int:
        return self.inner.coordinates(d)

    def paper_bits(self, d: int) -> int:
        return self.outer.paper_bits(self.inner.coordinates(d))

    @property
    def quantises(self) -> bool:  # type: ignore[override]
        return self.outer.quantises


def parse_quantiser(text: str) -> Compressor:
    """A compressor that keeps every value, rounded without bias."""
    quantiser = parse(text)
    if quantiser.coordinates(8) < 8 or quantiser.constants(8).eta > 0:
        raise SympruneError(f"Values can be rounded here (int8, int4), not left out as by {text}.")
    return quantiser


def top_k(x: Tensor, k: int) -> Tensor:
    """TopK(x) along the last dimension: the k largest magnitudes unchanged, the rest zero."""
    return torch.where(keep_largest(x.abs(), k), x, 0)


def count(k: float, d: int) -> int:
    """`k` itself, or for k < 1 that fraction of d (at least one entry)."""
    number = max(1, round(k * d)) if 0 < k < 1 else int(k)
    if number != k and k >= 1:
        raise SympruneError(f"k = {k} is neither a whole number nor a fraction below 1.")
    if not 1 <= number <= d:
        raise SympruneError(f"k = {k} is outside 1..{d}, the dimension.")
    return number


MAKERS = {
    "identity": (Identity, 0),
    "top-k": (TopK, 1),
    "rand-k": (RandK, 1),
    "scaled-rand-k": (lambda k: RandK(k, scaled=True), 1),
    "mix": (Mix, 2),
    "comp": (Comp, 2),
    "natural": (Natural, 0),
    "qsgd": (lambda levels: QSGD(int(levels)), 1),
    "int8": (lambda: WholeNumbers(8), 0),
    "int4": (lambda: WholeNumbers(4), 0),
}


def parse(text: str) -> Compressor:
    """`"comp:1,15"`, `"top-k:0.05"`, `"rand-k:3"`, or a chain `"top-k:10+int8"`."""
    first, *rest = text.split("+")
    compressor = _parse_one(first)
    for part in rest:
        compressor = Chain(compressor, _parse_one(part))
    return compressor


def _parse_one(text: str) -> Compressor:
    name, _, arguments = text.strip().partition(":")
    if name not in MAKERS:
        raise SympruneError(f"Unknown compressor {name!r}; choose from {', '.join(MAKERS)}.")
    maker, arity = MAKERS[name]
    try:
        numbers = [float(part) for part in arguments.split(",")] if arguments else []
    except ValueError:
        raise SympruneError(f"Compressor {text!r} has an argument that is no number.") from None
    if len(numbers) != arity:
        raise SympruneError(
            f"Compressor {name} takes {arity} numbers, {text!r} has {len(numbers)}."
        )
    return maker(*numbers)  # type: ignore[operator, no-any-return]
