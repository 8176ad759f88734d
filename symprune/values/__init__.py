"""Weights on a grid: the values a recipe may ask for, by name, and how they are found.

`grid` is what the values may be, `scales` rounds to it, `gptq` and `descent` look at a layer's
outputs, and `rounding` has the options a recipe may set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from symprune.validation import choose
from symprune.values.rounding import Int2, Int3, Int4, Int8, Rounding

VALUES: dict[str, type[Any]] = {kind.name: kind for kind in (Int8, Int4, Int3, Int2)}


def choose_rounding(options: str | Mapping[str, Any] | None) -> Rounding | None:
    """What a recipe's `values` says: nothing, a name, or a name with options."""
    return choose("values", VALUES, options)
