"""The statistics of a block, added up over all processes.

So all of them score the same numbers and make the same masks. Sums are exact (`stats`, `gram`), so
their order does not show in a bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from symprune.engine.collect import Collector
from symprune.machine import distributed
from symprune.stats import ChannelStats


def reduce(measured: Collector) -> None:
    """Add up the statistics of a block over all processes."""
    if distributed.size() == 1:
        return
    for table in (measured.inputs, measured.outputs):
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
    for names, channels, collect in agreed.values():
        if names[0] in done:
            continue
        done.update(names)
        met = [table[name] for name in names if name in table]
        stats = (
            met[0]
            if met
            else ChannelStats(channels, collect, device=device, gram_device=gram_device)
        )
        stats.all_reduce()
        table |= dict.fromkeys(names, stats)
