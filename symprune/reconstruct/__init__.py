"""Masks + a block's outputs -> weights that give them back: what a recipe's `reconstruct` asks for.

`fit` is the loop and its options, `weights` what is trained: kept weights as they are, or through
the rounding of a grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from symprune.reconstruct.fit import BlockReconstruction, PartReconstruction
from symprune.validation import choose

RECONSTRUCTIONS: dict[str, type[Any]] = {
    kind.name: kind for kind in (BlockReconstruction, PartReconstruction)
}


def choose_reconstruction(options: str | Mapping[str, Any] | None) -> BlockReconstruction | None:
    """What a recipe's `reconstruct` says: nothing, a name, or a name with options."""
    return choose("reconstruct", RECONSTRUCTIONS, options)
