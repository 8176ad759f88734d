"""What a recipe's `permute` does to a model: the hidden states first, then block after block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from symprune.engine.blocks import Blocks
from symprune.engine.collect import Collector
from symprune.engine.forward import Watch
from symprune.engine.permute.inside import BlockOrders, Ordered
from symprune.engine.permute.residual import find_residual, residual_figures, residual_moves
from symprune.models.layout import Layout
from symprune.models.matrices import Matrix
from symprune.permute import RESIDUAL
from symprune.recipe import Recipe


class Orders:
    """Orders the blocks of a model as the walk comes to them. The hidden states, where asked for,
    are in their order from the start."""

    def __init__(
        self, layout: Layout, blocks: Blocks, tokens: Tensor, recipe: Recipe, watch: Watch
    ) -> None:
        self.recipe = recipe
        self.residual: Mapping[str, Any] | None = None
        self.inside: BlockOrders | None = None
        inside = [part for part in recipe.permuted_parts if part != RESIDUAL]
        if inside:
            self.inside = BlockOrders(blocks, recipe, inside)
            self.inside.check_first(layout, blocks)
        if RESIDUAL in recipe.permuted_parts:
            self.residual = blocks.once(
                "order", lambda: find_residual(layout, blocks, tokens, recipe, watch)
            )
            blocks.reorder(residual_moves(self.residual))

    def order(
        self,
        index: int,
        block: nn.Module,
        found: list[Matrix],
        measured: Collector,
        watched: Collector,
    ) -> Ordered:
        """Order a block in place, and the statistics of its matrices with it."""
        done = Ordered()
        if self.inside is not None:
            done = self.inside.order(index, block, found, measured, watched)
        if self.residual is not None:
            done.figures |= residual_figures(found, measured, self.recipe, self.residual)
        return done
