"""The walk over a model: block by block, collect -> score -> mask -> apply -> pass on (thesis
6.3-6.4).

A block is entered once. Its statistics are collected while it is still dense, on inputs that come
from the already pruned blocks before it; then it is pruned and run again for the next block's
inputs. Memory beyond the model is one block's temporaries and one copy of the hidden states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from symprune import masks
from symprune.engine import decide, forward
from symprune.engine.allocation.divide import Division, divide_budget
from symprune.engine.blocks import Blocks, PrunedBlock
from symprune.engine.collect import Collector
from symprune.engine.forward import Watch
from symprune.engine.head import round_head
from symprune.engine.reconstruct import (
    Reconstruction,
    add_figures,
    check_processes,
    summary,
)
from symprune.engine.reduce import check_gram_memory, measure
from symprune.engine.report import LayerReport, Report, left_dense, warnings
from symprune.engine.tokens import read_tokens, take_windows
from symprune.errors import HalfPrunedError, SympruneError
from symprune.machine import distributed, host, memory
from symprune.maskset import MaskSet
from symprune.models.layout import Layout, device_of, find_layout
from symprune.models.matrices import Matrix, kind_of
from symprune.models.support import check_supported
from symprune.recipe import Recipe
from symprune.stats import ChannelStats, Needs
from symprune.validation import check_choice
from symprune.values.grid import fetch
from symprune.values.scales import round_to_grid

GRAM_DEVICES = ("auto", "cpu", "disk")


@dataclass(frozen=True)
class WalkPlan:
    """What the walk is to do, fixed before it starts."""

    recipe: Recipe
    needs: Needs
    report_error: bool = False
    base: MaskSet | None = None
    gram_device: str = "auto"
    held_out: int | None = None  # samples of this process; None: nobody watches
    removed: Mapping[str, int] = field(default_factory=dict)
    stored: torch.dtype | None = None  # what updated weights are rounded to


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
    gram_device: str = "auto",
    tell: Callable[[str], None] = lambda _: None,
    batch_size: int | None = None,
) -> Report:
    """Prune `model` in place and say what was done.

    In a torch.distributed process group the samples are divided among the processes. The model is
    computed in the type it has: on a CPU that is slow in it, `model.float()` first.

    Args:
        model: A causal LM of transformers.
        data: Its tokenizer, and the recipe says which text to calibrate on; or the calibration
            tokens themselves, `[samples, length]`, to which nothing is added.
        recipe: What to do; left out, RIA takes half of every row.
        watch: Called as the work goes on, see `Watch`.
        report_error: Also measure every layer's reconstruction error.
        base: Masks made earlier, to be refined instead of made.
        blocks: Where the blocks are, if not in memory, and what else is known of them.
        held_out: More tokens, on which steps that fit the calibration data are watched. If the
            recipe says `allocate: search`, allocations are tried on the last of them.
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
    if base is not None:
        _check_can_start_from_masks(recipe, base, layout)
    tokens, held_out, notes, found = read_tokens(model, data, held_out, recipe, needs)
    report = Report(recipe, tokens.shape[1], notes=notes, bos=found)
    report.parameters = layout.weights
    windows, held_out, said = take_windows(recipe, tokens, held_out)
    report.notes += said
    plan = WalkPlan(recipe, needs, report_error, base, gram_device)
    with forward.ready(model):
        tokens = distributed.share(tokens)
        if blocks is None:
            embeddings = model.get_input_embeddings().weight  # type: ignore[operator,union-attr]
            room = (device_of(model), tokens.shape[1], embeddings.shape[1], embeddings.dtype)
            blocks = Blocks(layout, at_once=batch_size or memory.batch_size(*room))
        plan = replace(plan, stored=blocks.stored)
        if recipe.allocation is not None:
            settings = (layout, blocks, tokens, windows, recipe, watch, tell)
            with _time(report, "allocate"):
                divided = blocks.once("allocation", lambda: asdict(divide_budget(*settings)))
            plan = replace(plan, removed=divided["counts"])
            found = Division(**divided)
            report.allocation = found.to_dict()
            report.notes += found.notes()
        if held_out is not None and (needs.gram or recipe.reconstruction is not None):
            held_out = distributed.share(held_out, every=False)
            plan = replace(plan, held_out=len(held_out))
            tokens = torch.cat([tokens, held_out.to(tokens.device)])
        with _say_how_much_is_pruned(layout, report) if blocks.in_memory else nullcontext():
            _walk(layout, blocks, tokens, report, plan, watch, tell)
        if recipe.head_grid is not None and blocks.in_memory:
            report.values |= round_head(model, recipe.head_grid)
    report.notes += [*layout.notes(), *left_dense(report.layers), *warnings(report.layers)]
    report.notes += summary(report.layers)
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
    update = recipe.weight_update
    if update is not None and update.finds_mask:
        raise SympruneError(f"{update.finds_mask}: leave out the masks to start from.")
    if recipe.allocation is not None:
        raise SympruneError("Masks say how much each layer gives: leave out the allocation.")


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
    layout: Layout,
    blocks: Blocks,
    tokens: Tensor,
    report: Report,
    plan: WalkPlan,
    watch: Watch,
    tell: Callable[[str], None],
) -> None:
    """tokens are this process's: calibration samples, then plan.held_out others."""
    count, samples = len(blocks), len(tokens)

    def ticker(stage: str, index: int) -> forward.Tick:
        return lambda done: watch(stage, index, count, done, samples, "")

    with _time(report, "embed"):
        begin = tokens if plan.needs or plan.recipe.reconstruction else None
        first, activations = blocks.begin(begin, report, ticker("embed", 0))
        rebuilt = None
        if plan.recipe.reconstruction is not None and activations is not None:
            dense = blocks.pass_dense(tokens, first)
            rebuilt = Reconstruction(dense, plan.recipe, plan.held_out, layout.prefix)

    def visit(index: int, block: nn.Module) -> None:
        """A function, so that nothing of a block is still held when the next one is entered."""
        found = layout.matrices(index)
        measured = watched = Collector()
        if activations is not None and plan.needs:
            settings = (activations, index, block, found)
            with _time(report, "collect"):
                if plan.needs.gram and index == first:
                    tell(check_gram_memory(*settings, plan.held_out, plan.gram_device))
                measured, watched = measure(
                    *settings, plan.needs, plan.held_out, plan.gram_device, ticker("collect", index)
                )
        if rebuilt is not None and activations is not None:
            with _time(report, "reconstruct"):
                if index == first:
                    tell(rebuilt.check_memory(index, block, activations))
                rebuilt.pass_dense(index, block)
        before = len(report.layers)
        with _time(report, "mask"):
            pruned = prune_block(
                found,
                measured,
                report,
                plan,
                watched,
                lambda n: watch("mask", index, count, n, len(found), found[n].name),
            )
        if rebuilt is not None and activations is not None:
            with _time(report, "reconstruct"):
                fitted = rebuilt.fit(
                    index, block, found, pruned, activations, report.layers[before:], plan.stored,
                    lambda n: watch("reconstruct", index, count, n, rebuilt.steps, ""),
                )  # fmt: skip
                add_figures(report, before, fitted)
        if activations is not None and index + 1 < count:
            with _time(report, "advance"):
                activations.advance(index, block, ticker("advance", index))
        with _time(report, "keep"):
            blocks.finish(index, report, pruned, activations)

    for index in range(first, count):
        with blocks.block(index) as block:
            visit(index, block)
        watch("done", index, count, samples, samples, "")


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


def prune_block(
    found: list[Matrix],
    measured: Collector,
    report: Report,
    plan: WalkPlan,
    watched: Collector | None = None,
    tick: forward.Tick = lambda _: None,
) -> PrunedBlock:
    """Make and apply the masks and values of a block; the pieces of a parameter share its mask.

    measured decides, wherever it was measured; watched are statistics of held-out tokens.
    """
    weights = {matrix.name: matrix.weight for matrix in found}
    decide.check_finite(weights, measured.inputs, measured.outputs)
    done, fused, before = PrunedBlock(), dict[str, Tensor](), len(report.layers)
    removed: list[Tensor] = []
    watched = watched or Collector()
    for number, matrix in enumerate(found):
        tick(number)
        decision = _prune_matrix(matrix, measured, report, plan, watched)
        keep = decision.keep
        if decision.values is not None:
            done.values[matrix.name] = decision.values
        if decision.unrounded is not None:
            done.unrounded[matrix.name] = decision.unrounded
        removed.append(keep.numel() - masks.count_true(keep.flatten()))
        if matrix.piece is None:
            done.masks[matrix.parameter_name] = keep.T if matrix.transposed else keep
            continue
        if matrix.parameter_name not in fused:
            fused[matrix.parameter_name] = keep.new_ones(matrix.parameter.shape)
        matrix.slice_of(fused[matrix.parameter_name]).copy_(keep)
    for name, keep in fused.items():
        done.masks[name] = keep
    done.masks.fetch()
    done.values = fetch(done.values)
    for number, count in enumerate(host.bring(removed), before):
        report.layers[number] = replace(report.layers[number], removed=int(count))
    for kind in sorted({kind_of(name) for name in measured.unknown}):
        note = f"Left dense, no layer of a known kind: {kind}."
        if note not in report.notes:
            report.notes.append(note)
    return done


def _prune_matrix(
    matrix: Matrix, measured: Collector, report: Report, plan: WalkPlan, watched: Collector
) -> decide.Decision:
    """Make and apply a matrix's mask, `[out, in]`, and its values; how much it removes is reported
    later. A matrix that must not be pruned keeps everything."""
    inputs, outputs = measured.inputs.get(matrix.name), measured.outputs.get(matrix.name)
    weight, tokens = matrix.weight, (inputs or outputs or ChannelStats(0)).tokens
    rows, columns = weight.shape
    layer = LayerReport(matrix.name, matrix.kind, matrix.part, rows, columns, 0, tokens)
    dense = _reason_to_stay_dense(matrix, measured, plan)
    if dense:
        values = None
        if plan.recipe.rounding is not None and matrix.piece is not None:
            # Those it is stored with are on a grid, so it must be as well.
            values = round_to_grid(weight, plan.recipe.rounding.grid)
            weight.copy_(values.dense())
            dense += ", values rounded to the nearest"
        report.layers.append(replace(layer, dense=dense))
        return decide.Decision(torch.ones_like(weight, dtype=torch.bool), values=values)
    base = None
    if plan.base is not None:
        base = matrix.slice_of(plan.base[matrix.parameter_name]).to(matrix.parameter.device)
    decision = decide.decide(
        matrix.name,
        matrix.part,
        weight,
        inputs,
        outputs,
        plan.recipe,
        plan.report_error,
        base=base,
        removed=plan.removed.get(matrix.name),
        held_out=watched.inputs.get(matrix.name) if inputs else None,
    )
    if decision.weight is not None:
        # Rounded now: the blocks behind this one are to see the weights that will be written. Of
        # values on a grid these are the codes.
        stored = weight.dtype if decision.values is not None else plan.stored or weight.dtype
        matrix.weight.copy_(decision.weight.to(stored))
    matrix.apply(decision.keep)
    report.layers.append(replace(layer, figures=decision.figures))
    return decision


def _reason_to_stay_dense(matrix: Matrix, measured: Collector, plan: WalkPlan) -> str:
    """Why a matrix is not pruned, in a few words; empty if it is.

    A criterion that looks at activations says nothing about a matrix no token came by, and its
    magnitudes are not what was asked for.
    """
    if matrix.name in measured.choosing:
        return "their output picks experts or tokens"
    asked, rounding = plan.recipe.criterion.needs, plan.recipe.rounding
    if plan.recipe.keeps_all:
        asked = ("input_norm",) if rounding and rounding.needs else ()
    unseen = ("input_norm" in asked and matrix.name not in measured.inputs) or (
        "output_norm" in asked and matrix.name not in measured.outputs
    )
    return "no calibration token came by" if unseen and plan.base is None else ""


@contextmanager
def _time(report: Report, stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    report.seconds[stage] = report.seconds.get(stage, 0.0) + time.perf_counter() - start
