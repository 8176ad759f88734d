"""How much noise makes K steps on sampled minibatches (epsilon, delta)-private.

The accountant composes privacy loss distributions (`dp-accounting`), rounded so that epsilon is
never too small: Poisson-subsampled Gaussian mechanism, add or remove one record. Its noise is the
discrete one of `mechanism.py`, whose deviation is millions of units, so that its curve and that of
the continuous Gaussian differ by less than the deviation is rounded up by. Beside it are a Renyi
accountant (Mironov, Talwar and Zhang), which brackets the search, and the closed form of LDP-FedP3
(thesis Theorem 4.3.4 and appendix C). The closed form's constant is not given there and its theorem
prints log(1/epsilon) where the proof has log(1/delta); c = 4 is safe for `epsilon <= min(q^2 K,
log(1/delta))` and is refused elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from symprune.errors import SympruneError

ORDERS = np.arange(2, 1025)
SAFE_CONSTANT = 4.0
USELESS = 1000.0  # an epsilon that promises nothing, however exact
FINEST, COARSEST = 1e-5, 1e-3  # of the grid of privacy losses
ROW, WINDOW, CLIENT = "row", "window", "client"


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


@lru_cache(maxsize=64)
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


@dataclass(frozen=True)
class Release:
    """Steps of one mechanism: each record takes part with probability `rate` and what is summed
    gets noise of `multiplier` clipping lengths. unit: what a record is, a row of data, a window of
    text or a client with all it has."""

    rate: float
    multiplier: float
    steps: int = 1
    unit: str = ROW

    def __post_init__(self) -> None:
        known = 0 < self.rate <= 1 and 0 < self.multiplier < math.inf and self.steps >= 1
        if not known or self.unit not in (ROW, WINDOW, CLIENT):
            raise SympruneError(
                f"A private release has 0 < q <= 1, noise above 0 and steps >= 1; "
                f"got {self.rate}, {self.multiplier}, {self.steps}."
            )


def in_one_unit(releases: Iterable[Release]) -> list[Release]:
    """The same as one row or window may count them. A client's clipped part stays as long if one of
    its rows changes, but may turn round: twice the clipping length, half the multiplier. Releases
    about clients alone stay what they are, a promise about all that a client has."""
    every = list(releases)
    if len({release.unit for release in every}) < 2:
        return every
    return [
        replace(each, multiplier=each.multiplier / 2) if each.unit == CLIENT else each
        for each in every
    ]


def compose(releases: Iterable[Release], delta: float) -> float:
    """The epsilon that all these releases spend together at this delta."""
    return _epsilon(*_together(releases), delta)


def renyi_bound(releases: Iterable[Release], delta: float) -> float:
    """An upper bound of `compose` that is quick to compute."""
    steps, whole = _together(releases)
    return _from_renyi(_divergence(steps, whole), delta) if steps or whole else 0.0


Steps = tuple[tuple[tuple[float, float], int], ...]  # ((rate, multiplier), how often)


def _together(releases: Iterable[Release]) -> tuple[Steps, float]:
    steps: Counter[tuple[float, float]] = Counter()
    whole = 0.0  # releases that every record takes part in are one with their precisions added up
    for release in releases:
        if release.rate == 1:
            whole += release.steps / release.multiplier**2
        else:
            steps[release.rate, release.multiplier] += release.steps
    return tuple(sorted(steps.items())), whole


def _divergence(steps: Steps, whole: float) -> np.ndarray:
    each = [count * renyi(rate, multiplier) for (rate, multiplier), count in steps]
    return np.sum([*each, ORDERS * whole / 2], axis=0)


@lru_cache(maxsize=256)
def _epsilon(steps: Steps, whole: float, delta: float) -> float:
    accounting = _accounting()
    bound = _from_renyi(_divergence(steps, whole), delta) if steps or whole else 0.0
    if not bound < USELESS:  # its grid of losses would not fit into memory
        return bound
    # Fifty places in the usual loss of one step, so that rounding each step up adds little.
    usual = min((rate / multiplier for (rate, multiplier), _ in steps), default=1.0)
    interval = min(COARSEST, max(FINEST, 0.02 * usual))
    accountant = accounting.pld.PLDAccountant(value_discretization_interval=interval)
    if whole:
        accountant.compose(accounting.GaussianDpEvent(whole**-0.5))
    for (rate, multiplier), count in steps:
        event = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(multiplier))
        accountant.compose(event, count)
    if not whole and not steps:
        return 0.0
    # Both are bounds; where epsilon is tiny the grid of losses is coarse and Renyi's is smaller.
    return min(float(accountant.get_epsilon(delta)), bound)


def _accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
    except ImportError:
        raise SympruneError(
            "Private runs need the exact accountant: pip install 'symprune[privacy]'."
        ) from None
    return dp_accounting


def epsilon(rate: float, multiplier: float, steps: int, delta: float) -> float:
    """The epsilon that `steps` steps spend at this delta."""
    return compose([Release(rate, multiplier, steps)], delta)


def renyi_epsilon(rate: float, multiplier: float, steps: int, delta: float) -> float:
    """An upper bound of `epsilon` from Renyi divergences."""
    return _from_renyi(steps * renyi(rate, multiplier), delta)


def _from_renyi(spent: np.ndarray, delta: float) -> float:
    spent = spent + np.log((ORDERS - 1) / ORDERS) - math.log(delta) / (ORDERS - 1)
    return float(max(0.0, (spent - np.log(ORDERS) / (ORDERS - 1)).min()))


@lru_cache(maxsize=64)
def noise_multiplier(target: float, delta: float, rate: float, steps: int) -> float:
    """The smallest z (to 0.1 %, from above) whose epsilon does not exceed the target."""
    _check(target, delta, rate, steps)
    low, high = 0.0, 1.0
    while renyi_epsilon(rate, high, steps, delta) > target:
        high *= 2
        if high > 1e6:
            raise SympruneError(f"No noise gives epsilon = {target} at delta = {delta}.")
    while high - low > 1e-2 * high:
        middle = (low + high) / 2
        if renyi_epsilon(rate, middle, steps, delta) > target:
            low = middle
        else:
            high = middle
    low = high
    while low > 0.01 and epsilon(rate, low, steps, delta) <= target:
        low, high = 0.8 * low, low
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
