"""How much each block gives, by its depth: ATP (Huang et al., 2025, arXiv 2502.14770)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from symprune.allocate.budget import Layer, by_unit, check_spread


@dataclass(frozen=True)
class ATP:
    """ATP (Huang et al., 2025): sparsities rise from block to block by the same step, for what an
    early block gets wrong goes through all later ones.

    spread: how far the first and the last block are from the whole's sparsity, (blocks - 1) / 2
    times the paper's step beta. Where that would leave [0, 1] it is as large as the paper allows.
    Nothing is measured, so no text is read; an expert that turns out to be met by no token stays
    dense, as it would with equal shares.
    """

    name: ClassVar[str] = "atp"
    needs: ClassVar[frozenset[str]] = frozenset()
    spread: float = 0.08

    def __post_init__(self) -> None:
        check_spread(self.spread)

    def __call__(self, layers: list[Layer], sparsity: float) -> dict[str, int]:
        return atp(layers, sparsity, self.spread)


def atp(layers: list[Layer], sparsity: float, spread: float) -> dict[str, int]:
    """Block i of L loses sparsity - spread + 2 spread i / (L - 1), with the spread no larger than
    the sparsity and what it leaves; a negative spread lets the first blocks lose most."""
    room = min(sparsity, 1 - sparsity)
    depth = {layer.block: float(layer.block) for layer in layers}
    bounded = min(max(spread, -room), room)
    return by_unit(layers, lambda layer: layer.block, depth, sparsity, bounded)
