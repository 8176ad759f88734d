"""The masks and values of a block's matrices: decided, by whichever process, and applied by all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from symprune import masks
from symprune.engine import decide, forward
from symprune.engine.blocks import PrunedBlock
from symprune.engine.collect import Collector
from symprune.engine.permute.orders import Orders
from symprune.engine.report import SHARE, LayerReport, Report
from symprune.engine.visit.shared_work import decide_together
from symprune.machine import host
from symprune.maskset import MaskSet
from symprune.models.matrices import Matrix, kind_of
from symprune.recipe import Recipe
from symprune.stats import DRIFT, ChannelStats, Needs
from symprune.update.targets import aim
from symprune.values.grid import fetch
from symprune.values.scales import round_to_grid


@dataclass(frozen=True)
class WalkPlan:
    """What the walk is to do, fixed before it starts."""

    recipe: Recipe
    needs: Needs
    report_error: bool = False
    base: MaskSet | None = None
    gram_device: str = "auto"
    held_out: int | None = None  # samples of this process; None: nobody watches
    written: int = 0  # samples of the model's own that only training sees
    removed: Mapping[str, int] = field(default_factory=dict)
    orders: Orders | None = None
    stored: torch.dtype | None = None  # what updated weights are rounded to
    tokens: int = 0  # to calibrate on, in all processes


def prune_block(
    found: list[Matrix],
    measured: Collector,
    report: Report,
    plan: WalkPlan,
    watched: Collector | None = None,
    tick: forward.Tick = lambda _: None,
) -> PrunedBlock:
    """Make and apply the masks and values of a block, or of some matrices of it; the pieces of a
    parameter share its mask and are given together.

    measured decides, wherever it was measured; watched are statistics of held-out tokens.
    """
    weights = {matrix.name: matrix.weight for matrix in found}
    decide.check_finite(weights, measured.inputs, measured.outputs, measured.gradients)
    reasons = [reason_to_stay_dense(matrix, measured, plan) for matrix in found]
    decisions = _decide(found, reasons, measured, plan, watched or Collector(), tick)
    done, fused, before = PrunedBlock(), dict[str, Tensor](), len(report.layers)
    removed: list[Tensor] = []
    for matrix, decision, dense in zip(found, decisions, reasons, strict=True):
        keep = _apply(matrix, decision, plan)
        report.layers.append(_describe(matrix, decision, dense, measured))
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


def _decide(
    found: list[Matrix],
    reasons: list[str],
    measured: Collector,
    plan: WalkPlan,
    watched: Collector,
    tick: forward.Tick,
) -> Iterator[decide.Decision]:
    """What becomes of each matrix. The work is divided among the processes by what a product with
    the Gram matrix takes, or by sizes where there is none."""
    pruned = [number for number, dense in enumerate(reasons) if not dense]
    shapes = [found[number].weight.shape for number in pruned]
    decisions = decide_together(
        [partial(_decide_matrix, found[n], measured, plan, watched) for n in pruned],
        [rows * columns ** (2 if plan.needs.gram else 1) for rows, columns in shapes],
        [found[number].parameter.device for number in pruned],
        lambda number: tick(pruned[number]),
    )
    for matrix, dense in zip(found, reasons, strict=True):
        yield _left_dense(matrix, plan) if dense else next(decisions)


def _decide_matrix(
    matrix: Matrix, measured: Collector, plan: WalkPlan, watched: Collector
) -> decide.Decision:
    inputs, base, weight = measured.inputs.get(matrix.name), None, matrix.weight
    held_out = watched.inputs.get(matrix.name) if inputs else None
    figures: dict[str, float] = {}
    if inputs is not None and held_out is not None and DRIFT in inputs.collect & held_out.collect:
        weight, figures[SHARE] = aim(weight, inputs, held_out, plan.recipe.targets)
    if plan.base is not None:
        base = matrix.slice_of(plan.base[matrix.parameter_name]).to(matrix.parameter.device)
    decision = decide.decide(
        matrix.name,
        matrix.part,
        weight,
        inputs,
        measured.outputs.get(matrix.name),
        plan.recipe,
        plan.report_error,
        base=base,
        removed=plan.removed.get(matrix.name),
        held_out=held_out,
        gradients=measured.gradients.get(matrix.name),
    )
    decision.figures |= figures
    return decision


def _left_dense(matrix: Matrix, plan: WalkPlan) -> decide.Decision:
    """A matrix that must not be pruned keeps everything. If those it is stored with are on a grid,
    it must be as well."""
    weight, values = matrix.weight, None
    if plan.recipe.rounding is not None and matrix.piece is not None:
        values = round_to_grid(weight, plan.recipe.rounding.grid)
    keep = torch.ones_like(weight, dtype=torch.bool)
    return decide.Decision(keep, None if values is None else values.dense(), values)


def _apply(matrix: Matrix, decision: decide.Decision, plan: WalkPlan) -> Tensor:
    """Put what was decided into the block; the mask."""
    if decision.weight is not None:
        # Rounded now: the blocks behind this one are to see the weights that will be written. Of
        # values on a grid these are the codes.
        computed = matrix.parameter.dtype
        stored = computed if decision.values is not None else plan.stored or computed
        matrix.weight.copy_(decision.weight.to(stored))
    matrix.apply(decision.keep)
    return decision.keep


def _describe(
    matrix: Matrix, decision: decide.Decision, dense: str, measured: Collector
) -> LayerReport:
    """What became of a matrix; how much of it was removed is counted later."""
    inputs, outputs = measured.inputs.get(matrix.name), measured.outputs.get(matrix.name)
    tokens, (rows, columns) = (inputs or outputs or ChannelStats(0)).tokens, matrix.weight.shape
    if dense and decision.values is not None:
        dense += ", values rounded to the nearest"
    return LayerReport(
        matrix.name, matrix.kind, matrix.part, rows, columns, 0, tokens, decision.figures, dense
    )


def reason_to_stay_dense(matrix: Matrix, measured: Collector, plan: WalkPlan) -> str:
    """Why a matrix is not pruned, in a few words; empty if it is.

    A criterion that looks at activations says nothing about a matrix no token came by, and its
    magnitudes are not what was asked for.
    """
    if matrix.name in measured.choosing:
        return "their output picks experts or tokens"
    asked, rounding = plan.recipe.criterion.needs, plan.recipe.rounding
    if plan.recipe.keeps_all:
        asked = ("input_norm",) if rounding and rounding.needs else ()
    unseen = (
        bool({"input_norm", "regional_gradient"} & set(asked))
        and matrix.name not in measured.inputs
    ) or ("output_norm" in asked and matrix.name not in measured.outputs)
    return "no calibration token came by" if unseen and plan.base is None else ""
