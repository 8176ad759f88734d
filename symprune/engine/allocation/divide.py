"""How much each layer gives, where that is not the same for all: at most one pass over the dense
model and, where candidates are tried, one more over a few windows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from torch import Tensor

from symprune import masks
from symprune.allocate import Measuring
from symprune.allocate.atp import ATP
from symprune.allocate.budget import Layer
from symprune.allocate.search import (
    UNIFORM,
    Search,
    candidates,
    choose,
    finalists,
    split_windows,
)
from symprune.engine import decide
from symprune.engine.allocation.trial import Trial
from symprune.engine.blocks import Blocks
from symprune.engine.collect import collect
from symprune.engine.forward import Watch
from symprune.engine.reduce import reduce
from symprune.engine.report import Report
from symprune.models.layout import Layout
from symprune.models.matrices import Matrix
from symprune.recipe import Recipe
from symprune.stats import SQUARE, Needs

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Division:
    """The budget as it was divided. chosen, divergence, first and share are a search's: which
    candidate won, and how far each was from the dense model, in nats a token, on every window that
    decided, and on every one at first, with that share of it gone."""

    counts: dict[str, int]
    chosen: str = ""
    divergence: dict[str, list[float]] = field(default_factory=dict)
    first: dict[str, list[float]] = field(default_factory=dict)
    share: float = 1.0

    def to_dict(self) -> dict[str, Any] | None:
        """What a search found, for the record."""
        if not self.chosen:
            return None
        known = {"chosen": self.chosen, "share": self.share}
        return {**known, **_means(self.divergence), "first": _means(self.first)}

    def notes(self) -> list[str]:
        """What a search found, in a sentence."""
        if not self.divergence:
            return []
        means = {name: fmean(values) for name, values in self.divergence.items()}
        of, equal = f"{len({**self.first, **means})} allocations", means[UNIFORM]
        if self.share < 1:
            of += f", tried with {100 * self.share:g} % of the weights they take gone,"
        if self.chosen == UNIFORM:
            return [
                f"Of {of} none was clearly better than equal shares for all layers, which are "
                f"{equal:.3g} nats a token from the dense model."
            ]
        return [
            f"Of {of} {self.chosen} was the nearest to the dense model: {means[self.chosen]:.3g} "
            f"nats a token, {equal:.3g} with equal shares for all layers."
        ]


def _means(divergence: dict[str, list[float]]) -> dict[str, Any]:
    means = {name: fmean(values) for name, values in divergence.items()}
    return {"windows": len(divergence.get(UNIFORM, ())), "divergence": means}


def divide_budget(
    layout: Layout,
    blocks: Blocks,
    tokens: Tensor,
    windows: Tensor,
    recipe: Recipe,
    watch: Watch,
    tell: Tell,
) -> Division:
    """How many weights each matrix loses, from the dense model and this process's tokens; windows
    are what candidates are tried on, the same in all processes."""
    chosen, sparsity = recipe.allocation, recipe.target_sparsity
    assert chosen is not None
    if isinstance(chosen, ATP):
        found = range(len(blocks))
        layers = [_layer(m, index, recipe) for index in found for m in layout.matrices(index)]
        return Division(chosen(layers, sparsity))
    layers, norms = _measure(chosen, layout, blocks, tokens, recipe, watch)
    if not isinstance(chosen, Search):
        return Division(chosen(layers, sparsity))
    tried = candidates(layers, sparsity)
    if len(tried) == 1:
        return Division(tried[UNIFORM], UNIFORM)

    def measure(some: dict[str, dict[str, int]], windows: Tensor) -> dict[str, list[float]]:
        milder = {name: chosen.milder(counts) for name, counts in some.items()}
        return Trial(layout, blocks, milder, norms, recipe.group).run(windows, watch, tell)

    looking, deciding = split_windows(windows)
    first = measure(tried, looking)
    left = finalists(tried, first, layers, sparsity)
    divergence = measure(left, deciding)
    best = choose(divergence)
    return Division(left[best], best, divergence, first, chosen.share)


def _measure(
    chosen: Measuring,
    layout: Layout,
    blocks: Blocks,
    tokens: Tensor,
    recipe: Recipe,
    watch: Watch,
) -> tuple[list[Layer], dict[str, Tensor]]:
    """What the rule wants to know of every matrix, and the norms of its inputs."""
    _, activations = blocks.begin(tokens, Report(recipe, tokens.shape[1]), lambda _: None)
    assert activations is not None
    outputs = frozenset({SQUARE}) if chosen.looks_at_outputs else frozenset[str]()
    needs = Needs(chosen.needs, outputs, recipe.token_limit)
    layers, norms, count = list[Layer](), dict[str, Tensor](), len(blocks)
    for index in range(count):
        with blocks.block(index) as block:
            found = layout.matrices(index)
            settings = (activations, index, block, found, needs)
            measured = collect(*settings, take=activations.replace)
            reduce(measured)
            weights = {matrix.name: matrix.weight for matrix in found}
            decide.check_finite(weights, measured.inputs, measured.outputs)
            for matrix in found:
                name = matrix.name
                if name in measured.choosing or name not in measured.inputs:
                    continue  # stays dense, or gives its equal share: nothing is known of it
                layer, own = _layer(matrix, index, recipe), measured.inputs[name]
                outgoing = measured.outputs.get(name)
                layers.append(
                    chosen.measure(layer, matrix.weight, own, outgoing, recipe.target_sparsity)
                )
                norms[name] = own.norm
        watch("allocate", index, count, len(tokens), len(tokens), "")
    return layers, norms


def _layer(matrix: Matrix, block: int, recipe: Recipe) -> Layer:
    rows, columns = matrix.weight.shape
    removed = masks.count_removed_from(rows, columns, recipe.target_sparsity, recipe.group)
    return Layer(matrix.name, block, rows, columns, removed, part=matrix.part)
