"""The walk over a model: block by block, collect -> score -> mask -> apply -> pass on (thesis
6.3-6.4).

A block is entered once. Its statistics are collected while it is still dense, on inputs that come
from the already pruned blocks before it; then it is pruned and run again for the next block's
inputs. Memory beyond the model is one block's temporaries and one copy of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from symprune.engine import decide, forward
from symprune.engine.allocation.divide import Division, divide_budget
from symprune.engine.blocks import Blocks
from symprune.engine.experts.drop import check_processes as check_one_process
from symprune.engine.experts.drop import drop_experts
from symprune.engine.experts.mixtures import plan_drop
from symprune.engine.forward import Watch
from symprune.engine.head import round_head
from symprune.engine.permute import inside
from symprune.engine.permute.orders import Orders
from symprune.engine.reconstruct import check_processes, summary
from symprune.engine.report import Report, fitted_to, left_dense, warnings
from symprune.engine.text.self_written import write_for
from symprune.engine.text.tokens import read_tokens, take_windows
from symprune.engine.visit.block import Visit, spend
from symprune.engine.visit.divided import divides_blocks, visit_together
from symprune.engine.visit.pruning import WalkPlan
from symprune.engine.visit.streams import Streams
from symprune.errors import HalfPrunedError, SympruneError
from symprune.machine import distributed, memory
from symprune.maskset import MaskSet
from symprune.models.layout import Layout, device_of, find_layout
from symprune.models.support import check_supported
from symprune.recipe import Recipe
from symprune.update.targets import OWN
from symprune.validation import check_choice

GRAM_DEVICES = ("auto", "cpu", "disk")


def prune(
    model: nn.Module,
    data: Any,
    recipe: Recipe | None = None,
    *,
    watch: Watch = lambda *_: None,
    report_error: bool = False,
    base: MaskSet | None = None,
    blocks: Blocks | None = None,
    held_out: Tensor | None = None,
    written: Tensor | None = None,
    gram_device: str = "auto",
    tell: Callable[[str], None] = lambda _: None,
    batch_size: int | None = None,
) -> Report:
    """Prune `model` in place and say what was done.

    In a torch.distributed process group the samples are divided among the processes or, where
    blocks are trained and none depends on another, the blocks. The model is
    computed in the type it has: on a CPU that is slow in it, `model.float()` first.

    Args:
        model: A causal LM of transformers.
        data: Its tokenizer, and the recipe says which text to calibrate on; or the calibration
            tokens themselves, `[samples, length]`, to which nothing is added.
        recipe: What to do; left out, RIA takes half of every row.
        watch: Called as the work goes on, see `Watch`.
        report_error: Also measure every layer's reconstruction error.
        base: Masks made earlier, to be refined instead of made.
        blocks: Where the blocks are, if not in memory, and what else is known of them; experts that
            the recipe drops are gone from them.
        held_out: More tokens, on which steps that fit the calibration data are watched. If the
            recipe says `allocate: search`, allocations are tried on the last of them.
        written: The windows of the model's own that the recipe asks for, from who has them; left
            out, the model, which is then in memory, writes them.
        gram_device: Where Gram matrices are kept: with their layer (`auto`), `cpu` or `disk`.
        tell: Called with sentences about the run.
        batch_size: How many samples pass a block together; left out, one on a CPU, so that not a
            bit depends on it, and what an accelerator has room for (`memory.batch_size`). With
            `blocks`, theirs counts.

    Raises:
        SympruneError: Something given does not fit; the model is as it was.
        HalfPrunedError: A failure on the way. A model in memory is pruned up to there, for keeping
            its dense weights would take its memory twice; blocks on disk stay as they were.
    """
    recipe = recipe or Recipe()
    _check_types(model, recipe)
    needs = decide.needs(recipe, report_error)
    check_supported(getattr(model, "config", None))
    layout = find_layout(model) if blocks is None else blocks.layout
    check_pattern(layout, recipe)
    check_choice("gram_device", gram_device, GRAM_DEVICES)
    check_processes(recipe)
    drop = recipe.fewer_experts if blocks is None else None
    if drop is not None:
        check_one_process()
        plan_drop(getattr(model, "config", None), drop)
    if base is not None:
        _check_can_start_from_masks(recipe, base, layout)
    tokens, held_out, notes, found = read_tokens(model, data, held_out, recipe, needs, tell)
    report = Report(recipe, tokens.shape[1], notes=notes, bos=found)
    report.parameters = layout.weights
    if recipe.leaves_order:
        report.notes.append(
            "No channel was permuted: sequential and targets measure a block group by group."
        )
    windows, held_out, said = take_windows(recipe, tokens, held_out)
    report.notes += said
    if written is None:
        written = write_for(model, tokens, recipe, None if found is None else found.token)
    if recipe.reconstruction is None:
        tokens, written = torch.cat([tokens, written]), written[:0]
    if recipe.targets != OWN and held_out is None:
        raise SympruneError(
            f"Held-out tokens decide about targets {recipe.targets}, and there are none; give a "
            "longer text, or held_out."
        )
    if drop is not None:
        report.experts, said = drop_experts(model, tokens, drop)
        report.notes += said
        layout = find_layout(model)
        report.parameters = layout.weights
    plan = WalkPlan(recipe, needs, report_error, base, gram_device, tokens=tokens.numel())
    with forward.ready(model):
        everything, tokens = tokens, distributed.share(tokens)
        if blocks is None:
            embeddings = model.get_input_embeddings().weight  # type: ignore[operator,union-attr]
            room = (device_of(model), tokens.shape[1], embeddings.shape[1], embeddings.dtype)
            blocks = Blocks(layout, at_once=batch_size or memory.batch_size(*room))
        plan = replace(plan, stored=blocks.stored)
        if recipe.allocation is not None:
            settings = (layout, blocks, tokens, windows, recipe, watch, tell)
            with spend(report, "allocate"):
                divided = blocks.once("allocation", lambda: asdict(divide_budget(*settings)))
            plan = replace(plan, removed=divided["counts"])
            division = Division(**divided)
            report.allocation = division.to_dict()
            report.notes += division.notes()
        if recipe.permuted_parts:
            with spend(report, "permute"):
                orders = Orders(layout, blocks, tokens, recipe, watch)
            plan = replace(plan, orders=orders)
            report.notes += orders.notes
        apart = divides_blocks(recipe)
        plan = replace(plan, written=len(written))
        tokens = torch.cat([everything if apart else tokens, written.to(tokens.device)])
        if held_out is not None and (needs.gram or recipe.reconstruction is not None):
            held_out = held_out if apart else distributed.share(held_out, every=False)
            plan = replace(plan, held_out=len(held_out))
            tokens = torch.cat([tokens, held_out.to(tokens.device)])
        with _say_how_much_is_pruned(layout, report) if blocks.in_memory else nullcontext():
            _walk(blocks, tokens, report, plan, watch, tell)
        if recipe.head_grid is not None and blocks.in_memory:
            report.values |= round_head(model, recipe.head_grid)
    report.notes += [*layout.notes(), *left_dense(report.layers), *warnings(report.layers)]
    report.notes += [*inside.summary(report.layers)]
    report.notes += [*fitted_to(report.layers, recipe.targets), *summary(report.layers)]
    report.peak_memory = memory.peak()
    return report


def _check_types(model: Any, recipe: Any) -> None:
    if not isinstance(model, nn.Module):
        raise SympruneError(f"prune takes a model in memory, not a {type(model).__name__}.")
    if not isinstance(recipe, Recipe):
        raise SympruneError(
            f"The recipe is a {type(recipe).__name__}; Recipe.from_dict and Recipe.named make one."
        )


def _check_can_start_from_masks(recipe: Recipe, base: MaskSet, layout: Layout) -> None:
    base.check_fits({m.parameter_name: m.parameter for m in layout.all_matrices()})
    recipe.check_takes_masks()


def check_pattern(layout: Layout, recipe: Recipe) -> None:
    """Fail before any work when an N:M pattern does not fit a layer."""
    if recipe.n_of_m is None:
        return
    for matrix in layout.all_matrices():
        if matrix.weight.shape[1] % recipe.n_of_m.m:
            raise SympruneError(
                f"Pattern {recipe.pattern} does not divide the {matrix.weight.shape[1]} input "
                f"channels of {matrix.name}."
            )


def _walk(
    blocks: Blocks,
    tokens: Tensor,
    report: Report,
    plan: WalkPlan,
    watch: Watch,
    tell: Callable[[str], None],
) -> None:
    """tokens are this process's: calibration samples, then plan.written ones that only training
    sees, then plan.held_out others."""
    count, samples = len(blocks), len(tokens)
    with spend(report, "embed"):
        first, streams = Streams.begin(
            blocks, tokens, report, plan, lambda done: watch("embed", 0, count, done, samples, "")
        )
    visit = Visit(blocks, streams, first, report, plan, watch, tell)
    if divides_blocks(plan.recipe):
        visit_together(visit)
        return
    for index in range(first, count):
        with blocks.block(index) as block:
            visit(index, block)
        visit.tell_done(index)


@contextmanager
def _say_how_much_is_pruned(layout: Layout, report: Report) -> Iterator[None]:
    """An error says how much of the model is pruned already; the last block may be so in part."""
    try:
        yield
    except SympruneError as error:
        pruned, count = {layer.name for layer in report.layers}, len(layout.blocks)
        blocks = sum(
            any(matrix.name in pruned for matrix in layout.matrices(index))
            for index in range(count)
        )
        if not blocks:
            raise
        raise HalfPrunedError(
            f"{error} {blocks} of {count} blocks of the model in memory are already pruned; load "
            "it again."
        ) from error
