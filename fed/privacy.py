"""How much noise makes K steps on sampled minibatches (epsilon, delta)-private.

Renyi accountant of the Poisson-subsampled Gaussian mechanism (Mironov, Talwar and Zhang), add or
remove one record, and the closed form of LDP-FedP3 (thesis Theorem 4.3.4 and appendix C). The
closed form's constant is not given there and its theorem prints log(1/epsilon) where the proof has
log(1/delta); c = 4 is safe for `epsilon <= min(q^2 K, log(1/delta))` and is refused elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from symprune.errors import SympruneError

ORDERS = np.arange(2, 1025)
SAFE_CONSTANT = 4.0


@lru_cache(maxsize=1)
def _log_binomials() -> tuple[np.ndarray, np.ndarray]:
    """`log C(a, j)` for all orders a and j (minus infinity for j > a), and the j."""
    top = int(ORDERS[-1])
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, top + 1)))])
    j = np.arange(top + 1)
    difference = ORDERS[:, None] - j[None, :]
    inside = difference >= 0
    other = log_factorial[np.where(inside, difference, 0)]
    value = log_factorial[ORDERS][:, None] - log_factorial[j][None, :] - other
    return np.where(inside, value, -np.inf), j


def renyi(rate: float, multiplier: float) -> np.ndarray:
    """Renyi divergence of one step at the orders 2 to 1024: sampling rate q, noise `z C/b`."""
    if rate >= 1:
        return ORDERS / (2 * multiplier**2)
    binomial, j = _log_binomials()
    powers = np.maximum(ORDERS[:, None] - j[None, :], 0) * math.log1p(-rate)
    terms = binomial + powers + j * math.log(rate) + (j * j - j) / (2 * multiplier**2)
    peak = terms.max(1, keepdims=True)
    total = peak[:, 0] + np.log(np.exp(terms - peak).sum(1))
    return total / (ORDERS - 1)


def epsilon(rate: float, multiplier: float, steps: int, delta: float) -> float:
    """The epsilon that `steps` steps spend at this delta."""
    spent = steps * renyi(rate, multiplier)
    spent = spent + np.log((ORDERS - 1) / ORDERS) - math.log(delta) / (ORDERS - 1)
    return float(max(0.0, (spent - np.log(ORDERS) / (ORDERS - 1)).min()))


@lru_cache(maxsize=64)
def noise_multiplier(target: float, delta: float, rate: float, steps: int) -> float:
    """The smallest z (to 0.1 %, from above) whose epsilon does not exceed the target."""
    _check(target, delta, rate, steps)
    low, high = 0.0, 1.0
    while epsilon(rate, high, steps, delta) > target:
        low, high = high, 2 * high
        if high > 1e6:
            raise SympruneError(f"No noise gives epsilon = {target} at delta = {delta}.")
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if epsilon(rate, middle, steps, delta) > target:
            low = middle
        else:
            high = middle
    return high


def closed_form_multiplier(
    target: float, delta: float, rate: float, steps: int, c: float = SAFE_CONSTANT
) -> float:
    """`z = (q/epsilon) sqrt(c K log(1/delta))`, only where it is known to be safe."""
    _check(target, delta, rate, steps)
    limit = min(rate**2 * steps, math.log(1 / delta))
    if target > limit:
        raise SympruneError(
            f"The closed form is unsafe for epsilon = {target} > {limit:.4g} = "
            "min(q^2 K, log(1/delta)); use the accountant."
        )
    return rate / target * math.sqrt(c * steps * math.log(1 / delta))


@dataclass(frozen=True)
class Schedule:
    """Steps, step size and the bound on the mean squared gradient norm of Theorem 4.3.4."""

    steps: float
    gamma: float
    bound: float


def theorem_schedule(
    rows: int,
    target: float,
    delta: float,
    smoothness: float,
    gap: float,
    clip: float,
    dimension: int,
    c: float = SAFE_CONSTANT,
) -> Schedule:
    """K, gamma and the bound `2 C sqrt(L Delta_0 c d log(1/delta)) / (m epsilon)`. The thesis drops
    the root of Delta_0 (`gap`) from K and the bound."""
    noise = c * dimension * math.log(1 / delta)
    product = rows * target
    steps = max(product * math.sqrt(smoothness * gap / noise) / clip, product**2 / noise)
    gamma = min(1 / smoothness, math.sqrt(gap * noise / smoothness) / (clip * product))
    return Schedule(steps, gamma, 2 * clip * math.sqrt(smoothness * gap * noise) / product)


def _check(target: float, delta: float, rate: float, steps: int) -> None:
    if not (target > 0 and 0 < delta < 1 and 0 < rate <= 1 and steps >= 1):
        raise SympruneError(
            f"Privacy needs epsilon > 0, 0 < delta < 1, 0 < q <= 1 and steps >= 1; "
            f"got {target}, {delta}, {rate}, {steps}."
        )
