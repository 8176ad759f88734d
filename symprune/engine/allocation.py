"""How much each layer gives, where that is not the same for all: one pass over the dense model."""

from __future__ import annotations

import torch
from torch import Tensor

from symprune import masks
from symprune.allocate import budget
from symprune.engine.blocks import Blocks
from symprune.engine.collect import collect
from symprune.engine.forward import Watch
from symprune.engine.reduce import reduce
from symprune.engine.report import Report
from symprune.models.layout import Layout
from symprune.recipe import Recipe
from symprune.stats import SQUARE, ChannelStats, Needs


def divide_budget(
    layout: Layout, blocks: Blocks, tokens: Tensor, recipe: Recipe, watch: Watch
) -> dict[str, int]:
    """How many weights each matrix loses, from one pass over the dense model."""
    chosen, count = recipe.allocation, len(blocks)
    assert chosen is not None
    _, activations = blocks.begin(tokens, Report(recipe, tokens.shape[1]), lambda _: None)
    assert activations is not None
    sparsity, square = recipe.target_sparsity, frozenset({SQUARE})
    needs = Needs(square, square if chosen.looks_at_outputs else frozenset(), recipe.token_limit)
    layers = []
    for index in range(count):
        with blocks.block(index) as block:
            found = layout.matrices(index)
            measured = collect(activations, index, block, found, needs, advance=True)
            reduce(measured)
            for matrix in found:
                name, weight = matrix.name, matrix.weight
                rows, columns = weight.shape
                removed = masks.removed_from(rows, columns, sparsity, recipe.group)
                layer = budget.Layer(name, index, rows, columns, removed)
                input_norm = _norm(measured.inputs.get(name), weight[0])
                output_norm = _norm(measured.outputs.get(name), weight[:, 0])
                score = weight.float().abs() * input_norm
                layers.append(chosen.measure(layer, score, output_norm, sparsity))
        watch("allocate", index, count, len(tokens), len(tokens), "")
    return chosen(layers, sparsity)


def _norm(stats: ChannelStats | None, channels: Tensor) -> Tensor:
    """The channels' norms; ones when nothing came by, as at an expert that got no token."""
    return torch.ones_like(channels, dtype=torch.float32) if stats is None else stats.norm
