"""The statistics of a block, measured and added up over all processes.

So all of them score the same numbers and make the same masks. Sums are exact (`stats`, `gram`), so
their order does not show in a bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from symprune.engine.blocks import Pass
from symprune.engine.collect import Beside, Collector, Take, collect, look
from symprune.engine.forward import Activations, Tick
from symprune.engine.gradients import regional_gradients
from symprune.errors import SympruneError
from symprune.gram import memory_of
from symprune.machine import distributed, memory
from symprune.models.layout import Layout, device_of
from symprune.models.matrices import Matrix
from symprune.stats import ChannelStats, Needs


def measure(
    activations: Activations,
    index: int,
    block: nn.Module,
    found: list[Matrix],
    needs: Needs,
    held_out: int | None = None,
    gram_device: str = "auto",
    tick: Tick = lambda _: None,
    take: Take | None = None,
    only: frozenset[str] | None = None,
    beside: Beside | None = None,
    written: int = 0,
) -> tuple[Collector, Collector]:
    """The statistics of a block on all processes' calibration samples and, where a step that fits
    them is watched, on the held-out ones: the last `held_out` of this process. take is given the
    block's outputs for all samples; only are the names of the matrices to measure, if not all;
    beside gives what drift is measured against. The last `written` before the held-out ones are not
    measured."""
    settings, how = (activations, index, block, found), (take, only, beside)
    watching = len(activations) - (held_out or 0)
    calibrating = watching - written
    measured = collect(*settings, needs, tick, range(calibrating), gram_device, *how)
    if needs.gradients:
        measured.gradients = regional_gradients(*settings, range(calibrating), tick)
    reduce(measured)
    if take is not None:
        for samples in activations.batches(range(calibrating, watching)):
            take(samples, activations.run(index, block, samples))
    if held_out is None or not (needs.gram or take):
        return measured, Collector()
    others = range(watching, len(activations))
    watched = collect(*settings, needs.watched, tick, others, gram_device, *how)
    reduce(watched)
    return measured, watched


def pass_as_measured(layout: Layout, held_out: int | None, written: int = 0) -> Pass:
    """Passes a block that stays as it is; samples that `measure` has pass together do so."""

    def pass_by(activations: Activations, index: int, block: nn.Module) -> None:
        found, take = layout.matrices(index), activations.replace
        measure(activations, index, block, found, Needs(), held_out, take=take, written=written)

    return pass_by


def check_gram_memory(
    activations: Activations,
    index: int,
    block: nn.Module,
    groups: list[list[Matrix]],
    held_out: int | None,
    gram_device: str,
    drift: bool = False,
) -> str:
    """What the Gram matrices of a block will take, as a sentence; an error when it is too much.
    Those of a group are there at a time."""
    found = [matrix for group in groups for matrix in group]
    inputs = look(activations, index, block, found).inputs
    widths = [_widths(group, inputs) for group in groups]
    needed = max(sum(memory_of(width, drift) for width in each) for each in widths)
    needed *= 1 if held_out is None else 2
    where = "disk" if gram_device == "disk" else "memory"
    device = device_of(block) if gram_device == "auto" else torch.device("cpu")
    free = memory.free(device)
    if where == "memory" and needed > free:
        elsewhere = "disk" if device.type == "cpu" else "cpu or disk"
        raise SympruneError(
            f"The Gram matrices of a block need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are "
            f"free; pass --gram-device {elsewhere}."
        )
    count, often = sum(map(len, widths)), "" if len(groups) == 1 else " at a time"
    return f"Gram matrices: {count} a block, {needed / 1e6:,.0f} MB of {where}{often}"


def _widths(group: list[Matrix], inputs: Mapping[str, ChannelStats]) -> list[int]:
    """Those of the inputs that matrices are given; a shared input counts once."""
    found = {id(stats): stats for m in group if (stats := inputs.get(m.name)) is not None}
    return [stats.channels for stats in found.values()]


def reduce(measured: Collector) -> None:
    """Add up the statistics of a block over all processes."""
    if distributed.size() == 1:
        return
    for table in (measured.inputs, measured.outputs, measured.gradients):
        _reduce(table, measured.device, measured.gram_device)
    seen: list[tuple[set[str], set[str]]] = [(set(), set())] * distributed.size()
    dist.all_gather_object(seen, (measured.choosing, measured.unknown))
    for choosing, unknown in seen:
        measured.choosing |= choosing
        measured.unknown |= unknown


def _reduce(table: dict[str, ChannelStats], device: torch.device, gram_device: str) -> None:
    """The processes may have met different experts: first they agree on what there is."""
    groups: dict[int, tuple[ChannelStats, list[str]]] = {}
    for name, stats in table.items():
        groups.setdefault(id(stats), (stats, []))[1].append(name)
    mine = [(names, s.channels, sorted(s.collect)) for s, names in groups.values()]
    everyone: list[list[tuple[list[str], int, list[str]]]] = [[] for _ in range(distributed.size())]
    dist.all_gather_object(everyone, mine)
    agreed: dict[str, tuple[list[str], int, list[str]]] = {}
    for group in (group for process in everyone for group in process):
        if not any(name in agreed for name in group[0]):
            agreed |= dict.fromkeys(group[0], group)
    done: set[str] = set()
    for names, channels, wanted in agreed.values():
        if names[0] in done:
            continue
        done.update(names)
        met = [table[name] for name in names if name in table]
        stats = (
            met[0]
            if met
            else ChannelStats(channels, wanted, device=device, gram_device=gram_device)
        )
        stats.all_reduce()
        table |= dict.fromkeys(names, stats)
