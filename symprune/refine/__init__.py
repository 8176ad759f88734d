"""Mask + statistics -> better mask: the refinements a recipe may ask for, by name.

Each is a file with its formula and, beside it, the options a recipe may set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from symprune.refine.dsnot import DSnoT, R2DSnoT
from symprune.refine.swap import Swap
from symprune.validation import choose

Refinement = DSnoT | Swap
REFINEMENTS: dict[str, type[Any]] = {kind.name: kind for kind in (DSnoT, R2DSnoT, Swap)}


def choose_refinement(options: str | Mapping[str, Any] | None) -> Refinement | None:
    """What a recipe's `refine` says: nothing, a name, or a name with options."""
    return choose("refinement", REFINEMENTS, options)
