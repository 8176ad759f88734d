"""Axes: from numbers to pixels, and where the ticks go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDE_RANGE = 4.0
"""Positive figures whose largest is this many times the smallest go on a logarithmic axis."""
LARGEST = 1e100
"""Figures beyond it, or as near to zero, are on no axis."""


def is_drawable(value: float) -> bool:
    return value == 0 or 1 / LARGEST < abs(value) < LARGEST


@dataclass(frozen=True)
class Scale:
    """`low` lies at pixel `start`, `high` at pixel `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self, count: int) -> list[float]:
        """About `count` round numbers inside the axis."""
        if not self.log:
            return _linear_ticks(self.low, self.high, count)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
            ticks = [step * 10.0**d for d in decades for step in steps]
            inside = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(inside) <= count + 1:
                break
        every = max(1, round(len(inside) / count))
        return inside[::every]


def fit(values: Sequence[float], start: float, end: float, whole: bool = False) -> Scale:
    """An axis that holds the values with some air, logarithmic when their range is wide."""
    low, high = min(values), max(values)
    if whole:
        return Scale(low - 0.5, high + 0.5, start, end)
    if low > 0 and high / low > WIDE_RANGE:
        air = (high / low) ** 0.06
        return Scale(low / air, high * air, start, end, log=True)
    air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Scale(max(low - air, 0) if low >= 0 else low - air, high + air, start, end)


def _linear_ticks(low: float, high: float, count: int) -> list[float]:
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float) -> str:
    """A tick as short as it can be."""
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{value:.6g}"


def percent_text(value: float) -> str:
    return f"{100 * value:.4g} %"
