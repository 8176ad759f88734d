"""Accuracies of several seeds as one cell of a table."""

from __future__ import annotations


def spread(values: list[float]) -> str:
    """Mean and standard deviation in percent; the mean alone for one seed."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{100 * mean:.1f}"
    deviation = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}"
