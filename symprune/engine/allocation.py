"""How much each layer gives, where that is not the same for all: one pass over the dense model."""

from __future__ import annotations

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
from symprune.stats import SQUARE, Needs


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
            settings = (activations, index, block, found, needs)
            measured = collect(*settings, take=activations.replace)
            reduce(measured)
            for matrix in found:
                name, weight = matrix.name, matrix.weight
                if name in measured.choosing or name not in measured.inputs:
                    continue  # stays dense, or gives its equal share: nothing is known of it
                rows, columns = weight.shape
                removed = masks.count_removed_from(rows, columns, sparsity, recipe.group)
                layer = budget.Layer(name, index, rows, columns, removed)
                outputs = measured.outputs.get(name)
                output_norm = weight.new_ones(rows).float() if outputs is None else outputs.norm
                score = weight.float().abs() * measured.inputs[name].norm
                layers.append(chosen.measure(layer, score, output_norm, sparsity))
        watch("allocate", index, count, len(tokens), len(tokens), "")
    return chosen(layers, sparsity)
