"""The channels of the hidden states in an order that an N:M pattern keeps more in, once for the
whole model: embeddings, norms, everything that reads the hidden states or adds to them, the head.

The order needs the scores of all blocks, so it takes a pass over the dense model. There every block
is tried: with its weights ordered it must make of ordered hidden states what it made before. What
reads and what adds shows on the way; norms do not care about order. Nothing is changed until all of
the model was tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from symprune.engine import decide, forward
from symprune.engine.blocks import Blocks
from symprune.engine.collect import Collector, collect
from symprune.engine.forward import Activations, Watch
from symprune.engine.permute.inside import (
    compare_with,
    embed_probe,
    figures,
    is_near,
    probe_tokens,
    score_of,
)
from symprune.engine.permute.links import kind
from symprune.engine.permute.moves import Move, apply_all, take_back
from symprune.engine.permute.probe import Probe
from symprune.engine.reduce import reduce
from symprune.models.layout import Layout
from symprune.models.matrices import Matrix
from symprune.permute import RESIDUAL, CannotPermute
from symprune.permute.order import find_order, take
from symprune.recipe import Recipe
from symprune.stats import SQUARE, Needs

MOST_SCORES = 2**26
"""Numbers of all matrices together that the order is found from; beyond, rows are skipped."""


def find_residual(
    layout: Layout, blocks: Blocks, tokens: Tensor, recipe: Recipe, watch: Watch
) -> dict[str, Any]:
    """The order, and which axes of which parameters have it, as JSON can hold them."""
    pattern = recipe.n_of_m
    assert pattern is not None
    probed = embed_probe(blocks)
    width = probed.hidden.shape[-1]
    if width % pattern.m:
        raise _refuse(f"its width, {width}, is no multiple of {pattern.m}")
    axes = _check_around(layout, blocks, probed)
    activations = blocks.embed(tokens) if _needs(recipe) else None
    every = _rows_skipped(layout, width)
    scores: list[Tensor] = []
    for index in range(len(blocks)):
        with blocks.block(index) as block:
            found = layout.matrices(index)
            probe = Probe(probed, index, block, found, f"{layout.prefix}.{index}.")
            readers, moved = _check_block(probe, width)
            axes |= moved
            measured = _measure(activations, index, block, found, recipe)
            for matrix in (m for m in found if kind(m.name) in readers):
                met = activations is None or matrix.name in measured.inputs
                if met and matrix.name not in measured.choosing:
                    scores.append(_sample(matrix, measured, recipe, every).cpu())
        watch("permute", index, len(blocks), len(tokens), len(tokens), "")
    draw = decide.generator_for(recipe.seed, "order of the hidden states")
    order = find_order(torch.cat(scores), pattern, draw)
    return {"order": order.tolist(), "axes": axes}


def residual_moves(found: Mapping[str, Any]) -> list[Move]:
    """What `find_residual` found, for every parameter under each of its names."""
    return _moves(found["axes"], torch.tensor(found["order"]))


def _rows_skipped(layout: Layout, width: int) -> int:
    """Every how many-th row is looked at."""
    shapes = (matrix.weight.shape for matrix in layout.all_matrices())
    numbers = sum(rows * columns for rows, columns in shapes if columns == width)
    return max(1, -(-numbers // MOST_SCORES))


def _needs(recipe: Recipe) -> Needs:
    """The norms that the recipe's criterion looks at; gradients have no say in this order."""
    asked = recipe.criterion.needs
    inputs = frozenset({SQUARE} if "input_norm" in asked else ())
    outputs = frozenset({SQUARE} if "output_norm" in asked else ())
    return Needs(inputs, outputs, recipe.token_limit)


def _measure(
    activations: Activations | None,
    index: int,
    block: nn.Module,
    found: list[Matrix],
    recipe: Recipe,
) -> Collector:
    """What the recipe's criterion needs, of the dense model."""
    if activations is None:
        return Collector()
    take = activations.replace
    measured = collect(activations, index, block, found, _needs(recipe), take=take)
    reduce(measured)
    return measured


def _sample(matrix: Matrix, measured: Collector, recipe: Recipe, every: int) -> Tensor:
    """Some rows of a matrix's scores, so large that every matrix counts as much as another."""
    score = score_of(matrix, measured, recipe)[::every]
    whole = score.sum(dtype=torch.float64).clamp(min=torch.finfo(torch.float32).tiny)
    return score * (score.numel() / whole).float()


def residual_figures(
    found: list[Matrix], measured: Collector, recipe: Recipe, residual: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """What the matrices of a block that read the hidden states retain, before and now."""
    old = torch.tensor(residual["order"]).argsort()
    done = {}
    for matrix in found:
        columns = matrix.parameter.dim() - (2 if matrix.transposed else 1)
        reads = residual["axes"].get(matrix.parameter_name) == columns
        met = matrix.name in measured.inputs or "input_norm" not in recipe.criterion.needs
        if reads and met:
            score = score_of(matrix, measured, recipe)
            done[matrix.name] = figures(take(score, old), score, recipe)
    return done


def _check_around(layout: Layout, blocks: Blocks, probed: Activations) -> dict[str, int]:
    """The axes of what is around the blocks: all that end with the width of the hidden states.
    Fails where the model does not take these in another order."""
    width = probed.hidden.shape[-1]
    order = _draw_order(width)
    with blocks.around():
        named = _named_around(layout)
        axes = {n: p.dim() - 1 for n, p in named.items() if p.shape[-1] == width}
        tokens = probe_tokens(layout)
        before = forward.logits(layout, tokens, probed, 0)
        there = probed.copy()
        there.hidden.copy_(_take(probed.hidden, order))
        distinct = {id(named[name]): name for name in axes}
        moves = _moves({name: axes[name] for name in distinct.values()}, order)
        with _moved(named, moves):
            hidden = forward.embed(layout, tokens).hidden
            after = forward.logits(layout, tokens, there, 0)
    if not is_near(hidden, there.hidden) or not is_near(after, before):
        raise _refuse("its embeddings or its head treat them differently")
    return axes


def _named_around(layout: Layout) -> dict[str, nn.Parameter]:
    """The parameters around the blocks by all of their names. Fails where there are others that
    could add to the hidden states and that no text shows."""
    model, inside = layout.model, f"{layout.prefix}."
    named = dict(model.named_parameters(remove_duplicate=False))
    around = {name: p for name, p in named.items() if not name.startswith(inside)}
    root = layout.prefix.rpartition(".")[0]
    head = model.get_output_embeddings()  # type: ignore[operator]
    ends = set() if head is None else {id(p) for p in head.parameters()}
    others = [n for n, p in around.items() if not n.startswith(f"{root}.") and id(p) not in ends]
    if layout.shared or layout.others or (root and others):
        raise _refuse("it has parts besides its blocks that they may come from")
    return around


def _check_block(probe: Probe, width: int) -> tuple[set[str], dict[str, int]]:
    """The kinds of matrices that read the hidden states, and the axes of all of a block's
    parameters that are ordered with them. Fails where the block does not take these in another
    order."""
    order = _draw_order(width)
    parameters, biases = probe.parameters, probe.biases
    hidden = _take(probe.hidden, order)
    axes = _find_others(probe, width)
    readers, writers = _find_roles(probe, _moves(axes, order), order)
    for matrix in probe.matrices:
        dimensions = matrix.parameter.dim()
        if kind(matrix.name) not in readers | writers:
            continue
        if matrix.piece is not None and dimensions != 3:
            raise _refuse(f"{matrix.parameter_name} is stacked in a way that is not known")
        axis = int((kind(matrix.name) in readers) != matrix.transposed)
        axes[matrix.parameter_name] = axis + dimensions - 2
        bias = biases.get(matrix.parameter_name)
        if kind(matrix.name) in writers and bias is not None:
            axes[bias] = parameters[bias].dim() - 1
    before, out = probe.run()
    written = {n: order for n in before.made if kind(n) in writers}
    with _moved(parameters, _moves(axes, order)):
        compare_with(probe, before, _take(out, order), written, hidden)
    return readers, axes


def _find_roles(probe: Probe, moves: list[Move], order: Tensor) -> tuple[set[str], set[str]]:
    """The kinds of matrices that read the hidden states, and of those that add to them: who is
    given what is ordered reads it; of the others, who gives back as many channels adds."""
    readers: set[str] = set()
    writers: set[str] = set()

    def find_role(name: str, x: Tensor, y: Tensor) -> None:
        given, made = before.given[name], before.made[name]
        if x.shape[-1] == len(order) and is_near(x, _take(given, order)):
            readers.add(kind(name))
        elif y.shape[-1] == len(order):
            writers.add(kind(name))
            made = _take(made, order)
        y.copy_(made)

    with probe.unbiased():
        before, out = probe.run()
        with _moved(probe.parameters, moves):
            _, now = probe.run(find_role, _take(probe.hidden, order))
    if not is_near(now, _take(out, order)):
        raise _refuse(f"block {probe.index} treats them differently")
    return readers, writers


def _find_others(probe: Probe, width: int) -> dict[str, int]:
    """The axes of a block's norms and routers, and of all else that ends with the width of the
    hidden states and is neither a matrix nor added to what one gives."""
    known = {matrix.parameter_name for matrix in probe.matrices} | set(probe.biases.values())
    return {
        name: parameter.dim() - 1
        for name, parameter in probe.parameters.items()
        if name not in known and parameter.dim() and parameter.shape[-1] == width
    }


def _draw_order(width: int) -> Tensor:
    """Any order: what one shows, all do."""
    return torch.randperm(width, generator=torch.Generator().manual_seed(0))


def _take(tensor: Tensor, order: Tensor) -> Tensor:
    return tensor.index_select(-1, order.to(tensor.device))


def _moves(axes: Mapping[str, int], order: Tensor) -> list[Move]:
    return [Move(name, axis, order) for name, axis in axes.items()]


@contextmanager
def _moved(parameters: Mapping[str, nn.Parameter], moves: list[Move]) -> Iterator[None]:
    """Parameters that are ordered as long as the context lasts."""
    apply_all(parameters, moves)
    try:
        yield
    finally:
        take_back(parameters, moves)


def _refuse(why: str) -> CannotPermute:
    return CannotPermute(f"The hidden states of this model have an order, as {why}", RESIDUAL)
