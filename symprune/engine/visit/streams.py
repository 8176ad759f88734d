"""The hidden states in front of the next block: behind the pruned blocks, behind the dense ones, or
both side by side, as a recipe asks for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from symprune.engine.blocks import Blocks, Pass
from symprune.engine.forward import Activations, Tick
from symprune.engine.reconstruct import Reconstruction
from symprune.engine.reduce import pass_as_measured
from symprune.engine.report import Report
from symprune.engine.visit.pruning import WalkPlan


@dataclass
class Streams:
    """What goes from block to block; None where nothing asks for it. rebuilt trains blocks to give
    the dense states back."""

    pruned: Activations | None = None
    dense: Activations | None = None
    rebuilt: Reconstruction | None = None

    @classmethod
    def begin(
        cls, blocks: Blocks, tokens: Tensor, report: Report, plan: WalkPlan, tick: Tick
    ) -> tuple[int, Streams]:
        """The first block to prune, and what is in front of it."""
        recipe, made = plan.recipe, cls()
        if not plan.needs and recipe.reconstruction is None:
            return blocks.begin(None, report, tick)[0], made
        pass_by: Pass = Activations.advance
        if recipe.inputs == "dense":
            pass_by = pass_as_measured(blocks.layout, plan.held_out, plan.written)
        if recipe.follows_pruned:
            first, made.pruned = blocks.begin(tokens, report, tick)
            if made.pruned is not None and recipe.follows_dense:
                made.dense = blocks.pass_dense(tokens, first, pass_by)
        else:
            first, made.dense = blocks.begin(tokens, report, tick, pass_by)
        if recipe.reconstruction is not None and made.dense is not None:
            prefix = blocks.layout.prefix
            made.rebuilt = Reconstruction(made.dense, recipe, plan.held_out, prefix, tokens)
        return first, made

    @property
    def leading(self) -> Activations | None:
        """The one a run that is interrupted goes on with."""
        return self.dense if self.pruned is None else self.pruned
