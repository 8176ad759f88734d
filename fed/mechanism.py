"""The Gaussian mechanism over whole numbers: clip to whole numbers, add discrete Gaussian noise.

Sampler of Canonne, Kamath and Steinke ("The discrete Gaussian for differential privacy", algorithms
1 to 3): nothing of a released number depends on how a float was rounded, which is what attacks on
floating-point noise use (Mironov 2012). Every coin with a probability exp(-x) is decided exactly: a
double tells all but one in 2^40 apart, and that one is decided with as many digits as it takes.

Whoever releases draws from the operating system's generator; a seed is for experiments only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError

UNITS = 1 << 24  # whole numbers in a clipping length
MOST_DEVIATION = 1 << 44
DOUBT = 2.0**-40  # more than a double's exp can be wrong by, for the probabilities here
LONGEST = 1e150  # whose square is finite
Draw = Callable[[int], np.ndarray]
"""So many fresh random 64-bit whole numbers."""


def system_draw(count: int) -> np.ndarray:
    """From the operating system's cryptographic generator."""
    return np.frombuffer(os.urandom(8 * count), np.uint64)


def seeded_draw(seed: int) -> Draw:
    """Repeatable, so without any protection: for experiments and tests."""
    generator = np.random.default_rng(seed)
    return lambda count: generator.integers(0, 1 << 64, count, np.uint64)


def clip_to_whole(relative: Tensor) -> Tensor:
    """Rows in units of the clipping length as whole numbers, int64, no row longer than `UNITS`.

    Rounding is towards zero, so it makes no row longer, and the length is checked after it."""
    wide = relative.double().nan_to_num(0.0, LONGEST, -LONGEST).clamp(-LONGEST, LONGEST)
    peak = wide.abs().amax(-1, keepdim=True).clamp_min(1.0)  # large rows: no square overflows
    scaled = wide / peak
    length = scaled.norm(dim=-1, keepdim=True) * peak
    short = torch.where(length > 1, scaled * (peak / length.clamp_min(1.0)), wide)
    # A sum of squares in doubles is off by less than this share for any model there is.
    whole = (short * (UNITS * (1 - 2.0**-30))).trunc()
    longest = float(whole.norm(dim=-1).max()) if whole.numel() else 0.0
    if longest > UNITS * (1 - 2.0**-31):
        raise SympruneError("A clipped row is longer than the noise is made for.")
    return whole.long()


def deviation(multiplier: float) -> int:
    """The noise's standard deviation in whole units, never below what the accountant was told."""
    if not 0 < multiplier < math.inf:
        raise SympruneError(f"A noise multiplier must be above 0, not {multiplier}.")
    sigma = math.ceil(multiplier * UNITS * (1 + 2.0**-20))
    if sigma > MOST_DEVIATION:
        raise SympruneError(f"A noise multiplier of {multiplier} cannot be drawn exactly.")
    return sigma


def release(total: Tensor, multiplier: float, draw: Draw = system_draw) -> Tensor:
    """A sum of clipped rows with the mechanism's noise, whole numbers as well, int64."""
    noise = discrete_gaussian(deviation(multiplier), total.numel(), draw)
    return total + torch.from_numpy(noise).view(total.shape).to(total.device)


def discrete_gaussian(sigma: int, count: int, draw: Draw = system_draw) -> np.ndarray:
    """`count` whole numbers n with probability proportional to `exp(-n^2 / (2 sigma^2))`."""
    found: list[np.ndarray] = []
    missing = count
    while missing > 0:
        laplace = discrete_laplace(sigma, missing + missing // 2 + 16, draw)
        away = np.abs(laplace) - sigma
        # (|n| - sigma^2/t)^2 / (2 sigma^2) with t = sigma
        keep = coins(away, sigma, draw, half_square=True)
        found.append(laplace[keep][:missing])
        missing -= len(found[-1])
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def discrete_laplace(scale: int, count: int, draw: Draw) -> np.ndarray:
    """Up to `count` whole numbers with probability proportional to `exp(-|n| / scale)`."""
    within = below(scale, count, draw)
    within = within[coins(within, scale, draw)]
    beyond = np.zeros(len(within), np.int64)
    going = np.arange(len(within))
    while len(going):  # how often in a row a coin with probability 1/e falls heads
        going = going[coins(np.ones(len(going), np.int64), 1, draw)]
        beyond[going] += 1
    size = within + scale * beyond
    negative = draw(len(size)) >> np.uint64(63) == 1
    once = ~(negative & (size == 0))  # zero has no sign
    return np.where(negative, -size, size)[once]


def below(limit: int, count: int, draw: Draw) -> np.ndarray:
    """Up to `count` uniform whole numbers below the limit: the top bits, where they are below."""
    shift = np.uint64(64 - max(1, (limit - 1).bit_length()))
    values = (draw(count) >> shift).astype(np.int64)
    return values[values < limit]


def coins(
    above: np.ndarray, under: int, draw: Draw, *, half_square: bool = False, doubt: float = DOUBT
) -> np.ndarray:
    """Heads with probability `exp(-above/under)`, or `exp(-(above/under)^2 / 2)`, exactly."""
    ratio = above / under
    chance = np.exp(-ratio * ratio / 2 if half_square else -ratio)
    drawn = draw(len(above))
    place = drawn.astype(np.float64) * 2.0**-64
    heads: np.ndarray = place < chance
    for i in np.flatnonzero(np.abs(place - chance) <= doubt).tolist():
        exact = Fraction(int(above[i]), under)
        heads[i] = _decide(exact * exact / 2 if half_square else exact, int(drawn[i]), draw)
    return heads


def _decide(exponent: Fraction, drawn: int, draw: Draw) -> bool:
    """Whether the binary fraction that begins with these 64 bits is below exp(-exponent)."""
    bits = 64
    while True:
        with localcontext() as context:
            context.prec = bits  # decimal digits: far more than so many bits need
            chance = (-Decimal(exponent.numerator) / Decimal(exponent.denominator)).exp()
            least = Decimal(drawn) / Decimal(1 << bits)
            step, slack = Decimal(1) / Decimal(1 << bits), Decimal(10) ** (8 - bits)
            if least + step + slack < chance:
                return True
            if least - slack > chance:
                return False
        drawn, bits = drawn << 64 | int(draw(1)[0]), bits + 64
