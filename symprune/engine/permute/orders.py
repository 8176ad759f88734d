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
from symprune.permute import AUTO, RESIDUAL, CannotPermute
from symprune.recipe import Recipe

LEFT = "left"  # in the place of an order, with a sentence: why there is none


class Orders:
    """Orders the blocks of a model as the walk comes to them. The hidden states, where asked for,
    are in their order from the start.

    notes: sentences about what `auto` leaves in its order, as the model's structure demands.
    """

    def __init__(
        self, layout: Layout, blocks: Blocks, tokens: Tensor, recipe: Recipe, watch: Watch
    ) -> None:
        self.recipe = recipe
        self.notes: list[str] = []
        self.inside: BlockOrders | None = None
        self.residual: Mapping[str, Any] | None = None
        inside = [part for part in recipe.permuted_parts if part != RESIDUAL]
        if inside:
            self.inside = self._find_inside(layout, blocks, inside)
        if RESIDUAL in recipe.permuted_parts:
            settings = (layout, blocks, tokens, recipe, watch)
            found = blocks.once("order", lambda: self._find_residual(*settings))
            if LEFT in found:
                self.notes.append(found[LEFT])
                return
            self.residual = found
            blocks.reorder(residual_moves(found))

    @property
    def _tries(self) -> bool:
        """Whether what cannot be ordered is left as it is, instead of refused."""
        return self.recipe.permute == AUTO

    def _find_residual(self, *settings: Any) -> dict[str, Any]:
        try:
            return find_residual(*settings)
        except CannotPermute as error:
            if not self._tries:
                raise
            return {LEFT: f"{error.why}."}

    def _find_inside(self, layout: Layout, blocks: Blocks, parts: list[str]) -> BlockOrders | None:
        """The parts that the first block has, where `auto` asks for them; else all of them."""
        try:
            inside = BlockOrders(blocks, self.recipe, parts)
        except CannotPermute as error:
            if not self._tries:
                raise
            self.notes.append(f"{error.why}.")
            return None
        missing = inside.missing(layout, blocks)
        if missing and not self._tries:
            raise missing[0]
        self.notes += [f"{error.why}." for error in missing]
        return inside if inside.parts else None

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
            try:
                done = self.inside.order(index, block, found, measured, watched)
            except CannotPermute as error:  # the block is as it was
                if not self._tries:
                    raise
                done.notes.append(f"{error.why}.")
        if self.residual is not None:
            done.figures |= residual_figures(found, measured, self.recipe, self.residual)
        return done
