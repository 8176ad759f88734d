"""Exact refinement: one-for-one swaps that lower the layer's true error on the calibration data.

With d what a row has lost and G = X^T X, the row's error is ||X d||^2 = d^T G d. Keeping c = G d,

    growing g changes it by  -2 w_g c_g + w_g^2 G_gg,
    pruning q by              2 w_q c_q + w_q^2 G_qq,
    both together by the sum of the two and  -2 w_g w_q G_gq.

Every step takes the best few of each (with N:M: the best pair of the best few groups) and the part
of G between them. Inside that part swaps are made one after the other, each the exact best of all
pairs, as long as the error falls; then c is brought up to date at once. Rows that cannot improve
drop out. DSnoT steers by the mean of the error instead.

G is itself estimated, from few tokens. With `shrink` a swap must also lower d^T (G + shrink
diag G) d, the error if channels were that much less correlated than these tokens say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from symprune.machine import host
from symprune.masks import Pattern
from symprune.refine.dsnot import PARTS
from symprune.refine.swap_candidates import Anywhere, InGroups, check_pattern
from symprune.stats import GRAM, SHRINK, ChannelStats
from symprune.validation import check_choice, check_not_negative, check_positive

ROWS_AT_ONCE, ROWS_AT_ONCE_ELSEWHERE = 512, 4096  # on a CPU, on an accelerator
SMALLEST_GAIN = 1e-6  # of a row's error; below lies rounding
WORTH_LEAVING = 0.75  # rows that are done are left behind once no more than this share goes on


@dataclass(frozen=True)
class Swap:
    """Exact one-for-one swaps that lower the layer's true error on the calibration data.

    shrink: how far measured correlations are distrusted, in units of channels / tokens.
    """

    name: ClassVar[str] = "swap"
    needs: ClassVar[str] = GRAM
    layers: str = "all"
    max_swaps: int = 60
    candidates: int = 8
    shrink: float = SHRINK

    def __post_init__(self) -> None:
        check_choice("layers", self.layers, PARTS)
        check_positive(max_swaps=self.max_swaps, candidates=self.candidates)
        check_not_negative(shrink=self.shrink)

    def __call__(
        self, weight: Tensor, keep: Tensor, stats: ChannelStats, pattern: Pattern | None, base: str
    ) -> Tensor:
        return swap(
            weight,
            keep,
            stats.gram,
            max_swaps=self.max_swaps,
            candidates=self.candidates,
            shrink=self.shrink * stats.noise,
            pattern=pattern,
        )


def swap(
    weight: Tensor,
    keep: Tensor,
    gram: Tensor,
    *,
    max_swaps: int = 60,
    candidates: int = 8,
    shrink: float = 0.0,
    pattern: Pattern | None = None,
) -> Tensor:
    """The keep-mask after at most `max_swaps` swaps in every row of `weight` (`[out, in]`).

    Every row keeps as many as before; with a pattern both sides of a swap lie in one group of M. Of
    `candidates` to grow and as many to prune, at most half are used before the next are looked for.
    """
    if pattern is not None:
        check_pattern(keep, pattern)
    gram = gram.to(weight.device).contiguous()
    settings = (gram, max_swaps, candidates, shrink, pattern)
    at_once = ROWS_AT_ONCE if weight.device.type == "cpu" else ROWS_AT_ONCE_ELSEWHERE
    parts = [
        _swap_rows(rows.float().contiguous(), kept.contiguous(), *settings)
        for rows, kept in zip(weight.split(at_once), keep.split(at_once), strict=True)
    ]
    return torch.cat(parts)


@dataclass
class _Few:
    """Coordinates that may flip: those to grow, then as many to prune.

    cost is what flipping each alone changes the row's error by, ridge the part of it that is due to
    shrinking G, cross what a pair adds to the sum of its two costs, value what a flip takes from
    the row's loss.
    """

    index: Tensor  # [rows, 2k]
    value: Tensor  # [rows, 2k]
    cost: Tensor  # [rows, 2k]
    ridge: Tensor  # [rows, 2k]
    cross: Tensor  # [rows, 2k, 2k]


def _swap_rows(
    weight: Tensor,
    keep: Tensor,
    gram: Tensor,
    max_swaps: int,
    candidates: int,
    shrink: float,
    pattern: Pattern | None,
) -> Tensor:
    columns = weight.shape[1]
    result = F.pad(keep, (0, 1))  # what does not flip is written behind the last column
    lost = weight * ~keep
    pull = lost @ gram
    error = (lost * pull).sum(1)
    given = (weight, weight**2 * gram.diagonal(), keep, shrink, candidates)
    places = Anywhere(*given) if pattern is None else InGroups(*given, gram, pattern)
    rows = torch.arange(len(weight), device=weight.device)
    at_once = max(1, candidates // 2)
    look_every = host.steps_between_looks(weight.device)
    for number, done in enumerate(range(0, max_swaps, at_once)):
        few = _choose_few(places, pull, gram, shrink)
        steps = min(max_swaps - done, at_once)
        flip, gain = _swap_among(few, SMALLEST_GAIN * error, steps, places.paired)
        error -= gain
        pull -= F.embedding_bag(few.index, gram, per_sample_weights=few.value * flip, mode="sum")
        grown = places.grown.expand_as(flip)
        result[rows.unsqueeze(1), few.index.where(flip, columns)] = grown
        places.flip(flip)
        if (number + 1) % look_every:
            continue
        moved = flip.any(1)
        count = int(moved.sum())
        if not count:
            break
        if count <= WORTH_LEAVING * len(moved):
            on = host.first_true(moved, count)
            rows, pull, error = rows[on], pull[on], error[on]
            places.only(on)
    return result[:, :columns]


def _choose_few(places: Anywhere | InGroups, pull: Tensor, gram: Tensor, shrink: float) -> _Few:
    index, cost = places.find(pull)
    grow, prune = index.chunk(2, 1)
    value = torch.cat([places.weight.gather(1, grow), -places.weight.gather(1, prune)], 1)
    ridge = shrink * torch.cat([-places.own.gather(1, grow), places.own.gather(1, prune)], 1)
    place = (index * gram.shape[1]).unsqueeze(2) + index.unsqueeze(1)
    cross = gram.view(-1).index_select(0, place.view(-1)).view(place.shape)
    cross.mul_(2 * value.unsqueeze(2)).mul_(value.unsqueeze(1))
    return _Few(index, value, cost, ridge, cross)


def _swap_among(few: _Few, smallest: Tensor, steps: int, paired: bool) -> tuple[Tensor, Tensor]:
    """Which of the few flip after at most `steps` swaps, and by how much each row's error falls at
    least: a swap is worth the smaller of what it takes from the error and from the shrunk one.

    A swap is any one to grow with any one to prune, or, paired, the i-th of each.
    """

    def pairs(values: Tensor) -> Tensor:
        if paired:
            return values[:, :k] + values[:, k:]
        return (values[:, :k].unsqueeze(2) + values[:, k:].unsqueeze(1)).flatten(1)

    cost, cross, k = few.cost, few.cross, few.cost.shape[1] // 2
    together = cross[:, :k, k:]
    together = together.diagonal(dim1=1, dim2=2) if paired else together.flatten(1)
    together = together - pairs(few.ridge).clamp(max=0)
    row, on_cpu = torch.arange(len(cost), device=cost.device), cost.device.type == "cpu"
    flip = torch.zeros_like(cost, dtype=torch.bool)
    gain = torch.zeros_like(smallest)
    for _ in range(steps):
        change, place = (pairs(cost) + together).min(dim=1)
        g, q = (place, place + k) if paired else (place // k, place % k + k)
        better = change < -smallest
        if on_cpu and not better.any():
            break
        gain -= torch.where(better, change, torch.zeros_like(change))
        cost = cost + (cross[row, g] + cross[row, q]) * better.unsqueeze(1)
        used = torch.where(better, torch.inf, 0.0).to(cost.dtype)
        for flipped in (g, q):
            cost[row, flipped] += used
            flip[row, flipped] |= better
    return flip, gain
