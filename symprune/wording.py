"""Figures as a person says them: how far one moved, what share of a whole it is."""

from __future__ import annotations

import math

UNCHANGED = "unchanged"
AS_MUCH = 0.05  # percent: what moved less is not worth a digit


def difference(before: float, after: float) -> str:
    """`+62 %`, `-2.5 %`, `2,050 times`, or `unchanged`; nothing where there is no ratio."""
    if not (math.isfinite(before) and math.isfinite(after) and before > 0):
        return ""
    change = 100 * (after / before - 1)
    if abs(change) < AS_MUCH:
        return UNCHANGED
    if abs(change) >= 1000:
        return f"{after / before:,.0f} times"
    return f"{change:+.{0 if abs(change) >= 9.95 else 1}f} %"


def in_brackets(before: float, after: float) -> str:
    """The same behind a figure: ` (+62 %)`, or nothing."""
    said = difference(before, after)
    return f" ({said})" if said else ""


def percent_of(share: float) -> str:
    """`62.5 %`: three digits, and more where they would say all of what is not."""
    digits = next(n for n in range(3, 18) if share == 1 or f"{100 * share:.{n}g}" != "100")
    return f"{100 * share:.{digits}g} %"


def counted(number: int, what: str) -> str:
    """`1 cell`, `12 cells`"""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
