"""The walk over a model: block by block, collect -> score -> mask -> apply -> pass on (thesis
6.3-6.4).

A block is entered once. Its statistics are collected while it is still dense, on inputs that come
from the already pruned blocks before it; then it is pruned and run again for the next block's
inputs. Memory beyond the model is one block's temporaries and one copy of the hidden states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from symprune import allocate, bos, decide, distributed, masks, memory, walk
from symprune.blocks import Blocks
from symprune.bos import Bos
from symprune.calibration import begin_with, calibration_tokens, held_out_tokens
from symprune.choices import check_choice
from symprune.errors import SympruneError
from symprune.hub import max_length
from symprune.maskset import MaskSet
from symprune.models import Layout, Matrix, device_of, find_layout
from symprune.recipe import Recipe
from symprune.reports import LayerReport, Report, warnings
from symprune.stats import GRAM, SQUARE, ChannelStats, Needs
from symprune.support import check_supported

Watch = Callable[[str, int, int, int, int, str], None]
"""watch(stage, block, blocks, done, total, layer): called as the work goes on. What is done are
samples, or, in the stage `mask`, matrices: then `layer` is the name of the next."""
GRAM_DEVICES = ("auto", "cpu", "disk")


@dataclass(frozen=True)
class Plan:
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
    watch: Watch = lambda *_: None,
    report_error: bool = False,
    base: MaskSet | None = None,
    blocks: Blocks | None = None,
    held_out: Tensor | None = None,
    gram_device: str = "auto",
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Prune `model` in place and say what was done.

    data is a tokenizer, and the recipe says which text to calibrate on, or the calibration tokens
    themselves, `[samples, length]`, to which nothing is added. report_error also measures every
    layer's reconstruction error. base are masks made earlier, to be refined instead of made.
    blocks says where the blocks are, if not in memory, and what else is known of them. held_out are
    more tokens, which decide nothing: steps that fit the calibration data are watched on them.
    gram_device is where Gram matrices are kept: with their layer (auto), `cpu` or `disk`. In a
    torch.distributed process group the samples are divided among the processes. The model is
    computed in the type it has: on a CPU that is slow in it, `model.float()` first.
    """
    recipe = recipe or Recipe()
    needs = decide.needs(recipe, report_error)
    check_supported(getattr(model, "config", None))
    layout = find_layout(model)
    check_pattern(layout, recipe)
    check_choice("gram_device", gram_device, GRAM_DEVICES)
    if base is not None:
        _check_can_start_from_masks(recipe)
    tokens, held_out, notes, found = _tokens(model, data, held_out, recipe, needs)
    report = Report(recipe, tokens.shape[1], notes=notes, bos=found)
    report.parameters = sum(parameter.numel() for parameter in model.parameters())
    plan = Plan(recipe, needs, report_error, base, gram_device)
    with walk.ready(model):
        blocks = blocks or Blocks(layout)
        plan = replace(plan, stored=blocks.stored)
        tokens = distributed.share(tokens)
        if recipe.allocation is not None:
            with _timed(report, "allocate"):
                counts = blocks.once(
                    "allocation", lambda: _allocation(layout, blocks, tokens, recipe, watch)
                )
            plan = replace(plan, removed=counts)
        if needs.gram and held_out is not None:
            held_out = distributed.share(held_out, every=False)
            plan = replace(plan, held_out=len(held_out))
            tokens = torch.cat([tokens, held_out.to(tokens.device)])
        _walk(layout, blocks, tokens, report, plan, watch, tell)
    report.notes += warnings(report.layers)
    report.peak_memory = memory.peak()
    return report


def _tokens(
    model: nn.Module, data: Any, held_out: Tensor | None, recipe: Recipe, needs: Needs
) -> tuple[Tensor, Tensor | None, list[str], Bos | None]:
    if isinstance(data, Tensor):
        if data.dim() != 2 or data.numel() == 0:
            raise SympruneError("Calibration tokens must be a filled [samples, length] tensor.")
        if held_out is not None and held_out.shape[1:] != data.shape[1:]:
            raise SympruneError("Held-out tokens must be as long as the calibration tokens.")
        return data, held_out, [], None
    if not reads_text(recipe, needs):
        return torch.zeros((0, recipe.seqlen), dtype=torch.long), None, [], None
    seqlen, notes = cap_seqlen(model.config, recipe.seqlen)
    tokens, held_out = draw_tokens(data, recipe, needs, seqlen)
    found = bos.decide(recipe.bos, data, model.config, bos.in_memory(model))
    tokens = begin_with(tokens, found.token)
    held_out = None if held_out is None else begin_with(held_out, found.token)
    return tokens, held_out, [*notes, *found.notes], found


def reads_text(recipe: Recipe, needs: Needs) -> bool:
    """Whether calibration text has a say: in the masks, or in how much each layer gives."""
    return bool(needs) or recipe.allocation is not None


def draw_tokens(
    tokenizer: Any, recipe: Recipe, needs: Needs, seqlen: int
) -> tuple[Tensor, Tensor | None]:
    """The recipe's calibration tokens and, for a step that fits them, others to watch it on."""
    settings = (recipe.calibration, tokenizer, recipe.nsamples, seqlen, recipe.text_seed)
    tokens = calibration_tokens(*settings)
    return tokens, held_out_tokens(*settings) if needs.gram else None


def cap_seqlen(config: Any, seqlen: int) -> tuple[int, list[str]]:
    """The sequence length the model can take, and a note when that is less than was asked for."""
    limit = max_length(config)
    if limit is None or seqlen <= limit:
        return seqlen, []
    return limit, [f"The model supports {limit} positions: seqlen is {limit}, not {seqlen}."]


def _check_can_start_from_masks(recipe: Recipe) -> None:
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
    plan: Plan,
    watch: Watch,
    tell: Callable[[str], None],
) -> None:
    """tokens are this process's: calibration samples, then plan.held_out others."""
    count, samples = len(blocks), len(tokens)

    def ticker(stage: str, index: int) -> walk.Tick:
        return lambda done: watch(stage, index, count, done, samples, "")

    with _timed(report, "embed"):
        begin = tokens if plan.needs else None
        first, activations = blocks.begin(begin, report, ticker("embed", 0))

    def visit(index: int, block: nn.Module) -> None:
        """A function, so that nothing of a block is still held when the next one is entered."""
        found = layout.matrices(index)
        measured = watched = walk.Collector()
        if activations is not None:
            with _timed(report, "collect"):
                if plan.needs.gram and index == first:
                    tell(_gram_memory(activations, index, block, found, plan))
                tick = ticker("collect", index)
                measured, watched = _collect(activations, index, block, found, plan, tick)
        with _timed(report, "mask"):
            kept = prune_block(
                found,
                measured,
                report,
                plan,
                watched,
                lambda n: watch("mask", index, count, n, len(found), found[n].name),
            )
        if activations is not None and index + 1 < count:
            with _timed(report, "advance"):
                activations.advance(index, block, ticker("advance", index))
        with _timed(report, "keep"):
            blocks.finish(index, report, kept, activations)

    for index in range(first, count):
        with blocks.block(index) as block:
            visit(index, block)
        watch("done", index, count, samples, samples, "")


def _collect(
    activations: walk.Activations,
    index: int,
    block: nn.Module,
    found: list[Matrix],
    plan: Plan,
    tick: walk.Tick,
) -> tuple[walk.Collector, walk.Collector]:
    """The statistics of a block on all processes' calibration samples and, where somebody watches,
    on the held-out ones."""
    settings, held_out = (activations, index, block, found), plan.held_out
    calibrating = len(activations) - (held_out or 0)
    measured = walk.collect(*settings, plan.needs, tick, range(calibrating), plan.gram_device)
    distributed.reduce(measured)
    watched = walk.Collector()
    if held_out is not None:
        watching = replace(plan.needs, inputs=frozenset({GRAM}), outputs=frozenset())
        others = range(calibrating, len(activations))
        watched = walk.collect(*settings, watching, tick, others, plan.gram_device)
        distributed.reduce(watched)
    return measured, watched


def _gram_memory(
    activations: walk.Activations, index: int, block: nn.Module, found: list[Matrix], plan: Plan
) -> str:
    """What the Gram matrices of a block will take, as a sentence; an error when it is too much."""
    widths = walk.distinct_inputs(activations, index, block, found)
    needed = sum(4 * width * width for width in widths) * (1 if plan.held_out is None else 2)
    where = "disk" if plan.gram_device == "disk" else "memory"
    device = device_of(block) if plan.gram_device == "auto" else torch.device("cpu")
    free = memory.free(device)
    if where == "memory" and needed > free:
        elsewhere = "disk" if device.type == "cpu" else "cpu or disk"
        raise SympruneError(
            f"The Gram matrices of a block need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are "
            f"free; pass --gram-device {elsewhere}."
        )
    return f"Gram matrices: {len(widths)} a block, {needed / 1e6:,.0f} MB of {where}"


def prune_block(
    found: list[Matrix],
    measured: walk.Collector,
    report: Report,
    plan: Plan,
    watched: walk.Collector | None = None,
    tick: walk.Tick = lambda _: None,
) -> MaskSet:
    """Make and apply the masks of a block; experts share the mask of their fused parameter.

    measured decides, wherever it was measured; watched are statistics of held-out tokens.
    """
    kept, fused = MaskSet(), dict[str, Tensor]()
    watched = watched or walk.Collector()
    for number, matrix in enumerate(found):
        tick(number)
        if matrix.expert is None:
            kept[matrix.parameter_name] = _prune_matrix(matrix, measured, report, plan, watched)
        else:
            whole = fused.setdefault(
                matrix.parameter_name, torch.ones(matrix.parameter.shape, dtype=torch.bool)
            )
            whole[matrix.expert] = _prune_matrix(matrix, measured, report, plan, watched)
    for name, keep in fused.items():
        kept[name] = keep
    return kept


def _prune_matrix(
    matrix: Matrix, measured: walk.Collector, report: Report, plan: Plan, watched: walk.Collector
) -> Tensor:
    """Make and apply a matrix's mask, and return it in the order the matrix is stored in."""
    inputs, outputs = measured.inputs.get(matrix.name), measured.outputs.get(matrix.name)
    if plan.needs and not (inputs or outputs):
        report.notes.append(f"{matrix.name} saw no calibration tokens: its weights decide.")
    base = plan.base
    decision = decide.decide(
        matrix.name,
        matrix.part,
        matrix.weight,
        inputs,
        outputs,
        plan.recipe,
        plan.report_error,
        base=None if base is None else matrix.slice_of(base[matrix.parameter_name]),
        removed=plan.removed.get(matrix.name),
        held_out=watched.inputs.get(matrix.name) if inputs else None,
    )
    keep = decision.keep
    if decision.weight is not None:
        # Rounded now: the blocks behind this one are to see the weights that will be written.
        matrix.weight.copy_(decision.weight.to(plan.stored or matrix.weight.dtype))
    matrix.apply(keep)
    removed = keep.numel() - int(masks.count_true(keep.flatten()))
    tokens = (inputs or outputs or ChannelStats(0)).tokens
    rows, columns = matrix.weight.shape
    names = (matrix.name, matrix.kind, matrix.part)
    report.layers.append(LayerReport(*names, rows, columns, removed, tokens, decision.figures))
    return keep.T if matrix.transposed else keep


def _allocation(
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
            measured = walk.collect(activations, index, block, found, needs, advance=True)
            distributed.reduce(measured)
            for matrix in found:
                name, weight = matrix.name, matrix.weight
                rows, columns = weight.shape
                removed = masks.removed_from(rows, columns, sparsity, recipe.group)
                layer = allocate.Layer(name, index, rows, columns, removed)
                input_norm = _norm(measured.inputs.get(name), weight[0])
                output_norm = _norm(measured.outputs.get(name), weight[:, 0])
                score = weight.float().abs() * input_norm
                layers.append(chosen.measure(layer, score, output_norm, sparsity))
        watch("allocate", index, count, len(tokens), len(tokens), "")
    return chosen(layers, sparsity)


def _norm(stats: ChannelStats | None, channels: Tensor) -> Tensor:
    """The channels' norms; ones when nothing came by, as at an expert that got no token."""
    return torch.ones_like(channels, dtype=torch.float32) if stats is None else stats.norm


@contextmanager
def _timed(report: Report, stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    report.seconds[stage] = report.seconds.get(stage, 0.0) + time.perf_counter() - start
