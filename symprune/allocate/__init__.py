"""How much each layer gives: the ways to divide the sparsity a recipe may ask for, by name.

Each is a file with its formula and, beside it, the options a recipe may set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from symprune.allocate.atp import ATP
from symprune.allocate.by_error import ByError
from symprune.allocate.lsa import LSA
from symprune.allocate.owl import OWL
from symprune.allocate.search import Search
from symprune.validation import choose

Measuring = OWL | LSA | ByError | Search
"""Those that look at the dense model."""
Allocation = Measuring | ATP
ALLOCATIONS: dict[str, type[Any]] = {kind.name: kind for kind in (OWL, LSA, ATP, ByError, Search)}


def choose_allocation(options: str | Mapping[str, Any] | None) -> Allocation | None:
    """What a recipe's `allocate` says: nothing or `uniform`, a name, or a name with options."""
    return None if options == "uniform" else choose("allocation", ALLOCATIONS, options)
