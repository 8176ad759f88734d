"""Mask + statistics -> re-fitted weights: the updates a recipe may ask for, by name.

Each is a file with its formula and, beside it, the options a recipe may set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from symprune.update.admm import ADMM
from symprune.update.alps import ALPS
from symprune.update.least_squares import LeastSquares
from symprune.update.sparsegpt import SparseGPT
from symprune.validation import choose

Update = LeastSquares | SparseGPT | ADMM | ALPS
UPDATES: dict[str, type[Any]] = {kind.name: kind for kind in (LeastSquares, SparseGPT, ADMM, ALPS)}


def choose_update(options: str | Mapping[str, Any] | None) -> Update | None:
    """What a recipe's `update` says: nothing, a name, or a name with options."""
    return choose("update", UPDATES, options)


def under_masks(name: str | None) -> dict[str, Any]:
    """The options with which an update takes masks as they are instead of finding its own."""
    known = fields(UPDATES[name]) if name in UPDATES else ()
    return {"select": False} if any(each.name == "select" for each in known) else {}
