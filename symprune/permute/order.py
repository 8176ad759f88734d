"""Scores -> an order of the channels: which M stand together, so that N:M keeps the most.

Of every M neighbouring channels a row keeps its N best scores. Channels are sorted by their sums
and dealt out over the groups; then one channel of each group is taken out, and all that were are
assigned anew, each group getting the one that is worth the most to it beside those it has. That is
a linear sum assignment, solved exactly, so what is kept never falls. Many groups are assigned some
at a time, drawn anew for each. Knows tensors only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.masks import Pattern
from symprune.permute.assignment import assign

SWEEPS = 4
"""How often all channels may be assigned anew."""
ENOUGH = 1e-3
"""A sweep that adds less than this share of what is kept is the last."""
TOGETHER = 512
"""Groups that are assigned together at most: the time grows with their number's third power."""
ROWS, CACHED, AT_ONCE = 8, 2**17, 2**26
"""Of rows, and of comparisons, that are made together: on a CPU few enough to stay in its cache."""


def find_order(score: Tensor, pattern: Pattern, generator: torch.Generator) -> Tensor:
    """The order, on the CPU, of the columns of `score` (`[rows, channels]`, channels a multiple of
    M) in which the pattern keeps the most. What is not better than before stays as it is."""
    channels = score.shape[1]
    groups = channels // pattern.m
    dealt = score.sum(0, dtype=torch.float64).cpu().argsort(descending=True, stable=True)
    members = dealt.view(pattern.m, groups).T.contiguous()
    kept = retained(take(score, members), pattern)
    for _ in range(SWEEPS if groups > 1 else 0):
        members = _sweep(score, members, pattern, generator)
        before, kept = kept, retained(take(score, members), pattern)
        if kept - before <= ENOUGH * before:
            break
    members = members.sort(1).values
    order = members[members[:, 0].argsort()].flatten()
    as_it_is = torch.arange(channels)
    return order if retained(take(score, order), pattern) > retained(score, pattern) else as_it_is


def _sweep(score: Tensor, members: Tensor, pattern: Pattern, generator: torch.Generator) -> Tensor:
    """Every channel is assigned once; which of a group leave it together is drawn."""
    groups, size = members.shape
    members = members.gather(1, torch.rand(groups, size, generator=generator).argsort(1))
    for place in range(size):
        drawn = torch.randperm(groups, generator=generator)
        for some in drawn.chunk(-(-groups // TOGETHER)):
            _assign(score, members, some, place, pattern)
    return members


def _assign(score: Tensor, members: Tensor, some: Tensor, place: int, pattern: Pattern) -> None:
    """Give what stands at a place of some groups to those it is worth the most to, in place."""
    staying = [each for each in range(members.shape[1]) if each != place]
    leaving = members[some, place]
    others = take(score, members[some][:, staying])
    # A channel adds to a row what it has above the N-th of those that stay.
    level = others.view(len(score), len(some), -1).topk(pattern.n, dim=2).values[:, :, -1]
    worth = add_maxima(level, take(score, leaving)) - level.sum(0).unsqueeze(1)
    members[some, place] = leaving[torch.from_numpy(assign(worth.double().cpu().numpy()))]


def add_maxima(left: Tensor, right: Tensor) -> Tensor:
    """`[i, j]`: the sum over rows of the larger one of left[:, i] and right[:, j]."""
    rows, width = right.shape
    total = right.new_zeros(left.shape[1], width)
    room = CACHED if right.device.type == "cpu" else AT_ONCE
    high = max(1, room // (ROWS * width))
    for first in range(0, left.shape[1], high):
        part = total[first : first + high]
        for start in range(0, rows, ROWS):
            some = slice(start, start + ROWS)
            mine = left[some, first : first + high].unsqueeze(2)
            part += torch.maximum(mine, right[some].unsqueeze(1)).sum(0)
    return total


def take(score: Tensor, order: Tensor) -> Tensor:
    """The columns in this order, which is on the CPU."""
    return score.index_select(1, order.flatten().to(score.device))


def retained(score: Tensor, pattern: Pattern) -> float:
    """The sum of the scores that an N:M pattern keeps."""
    grouped = score.float().reshape(len(score), -1, pattern.m)
    return float(grouped.topk(pattern.n, dim=2).values.sum(dtype=torch.float64))
