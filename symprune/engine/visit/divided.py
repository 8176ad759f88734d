"""Blocks divided among the processes, where no block depends on what became of another: each
process prunes and trains every so many-th one, on all samples, and tells the others.

The dense model's hidden states pass all blocks in every process, so each finds to the bit what one
process finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from symprune.engine.blocks import PrunedBlock
from symprune.engine.reduce import pass_as_measured
from symprune.engine.report import LayerReport, Report
from symprune.engine.visit.block import Visit, spend
from symprune.errors import SympruneError
from symprune.machine import distributed
from symprune.recipe import Recipe


def divides_blocks(recipe: Recipe) -> bool:
    """Whether the processes take different blocks. Where nothing is trained they share samples and
    matrices, which takes less memory."""
    return distributed.size() > 1 and recipe.trains_apart


@dataclass
class _Done:
    """What a process made of a block: what became of it, its weights, and what is reported."""

    pruned: PrunedBlock
    weights: dict[str, Tensor]
    layers: list[LayerReport]
    notes: list[str] = field(default_factory=list)


def visit_together(visit: Visit) -> None:
    """All blocks from the visit's first on, as many at a time as there are processes."""
    count, processes = len(visit.blocks), distributed.size()
    for start in range(visit.first, count, processes):
        some = range(start, min(start + processes, count))
        done, failed = None, ""
        try:
            done = _do_own(visit, some)
        except SympruneError as error:
            failed = str(error)
        for sentence in filter(None, distributed.everyone(failed)):
            raise SympruneError(sentence)
        _finish(visit, some, done)


def _do_own(visit: Visit, some: Sequence[int]) -> _Done | None:
    """This process's block of some; the dense model's hidden states pass them all."""
    plan, layout, done = visit.plan, visit.blocks.layout, None
    pass_by = pass_as_measured(layout, plan.held_out, plan.written)
    assert visit.streams.dense is not None
    mine = some[0] + distributed.rank()
    with distributed.alone():
        for index in some:
            with visit.blocks.block(index) as block:
                if index == mine:
                    done = _visit_alone(visit, index, block)
                elif index + 1 < len(visit.blocks):
                    with spend(visit.report, "advance"):
                        pass_by(visit.streams.dense, index, block)
    return done


def _visit_alone(visit: Visit, index: int, block: nn.Module) -> _Done:
    """What becomes of a block, as if it were the first that is reported."""
    report = visit.report
    own = replace(visit, report=Report(report.recipe, report.seqlen, seconds=report.seconds))
    pruned = own.work(index, block)
    parameters = dict(visit.blocks.layout.model.named_parameters(remove_duplicate=False))
    changed = dict.fromkeys([*pruned.masks, *(move.parameter_name for move in pruned.moves)])
    weights = {name: parameters[name].detach().cpu() for name in changed}
    return _Done(pruned, weights, own.report.layers, own.report.notes)


def _finish(visit: Visit, some: Sequence[int], own: _Done | None) -> None:
    """One block after the other goes to all processes and is finished. The hidden states are those
    behind the last of them, so only there can a run that is interrupted go on with them."""
    report, dense = visit.report, visit.streams.dense
    for index in some:
        owner = index - some[0]
        done = distributed.tell(own if owner == distributed.rank() else None, owner)
        report.layers += done.layers
        report.notes += [note for note in done.notes if note not in report.notes]
        with visit.blocks.block(index), spend(report, "keep"):
            _put_in(visit, done)
            states = dense if index == some[-1] else None
            visit.blocks.finish(index, report, done.pruned, states)
        visit.tell_done(index)


def _put_in(visit: Visit, done: _Done) -> None:
    parameters = dict(visit.blocks.layout.model.named_parameters(remove_duplicate=False))
    for name, weight in done.weights.items():
        parameters[name].data.copy_(weight)
