"""Replies of which some may be hostile: which count, or what stands for their mean.

`norm:K` leaves out a reply that is K times as far from the coordinate-wise median as is usual: as
the median reply was, in the round of the run in which that was farthest. Late in a run the others
all but agree, and who has few rows is no liar for being behind. Of lists, whose values have no
common places, the lengths as vectors are compared, in units of the median length at least.
`krum:f` leaves out the f replies that are farthest from their nearest neighbours (Blanchard et al.,
Multi-Krum). A reply that is left out is one that never came, so whatever an algorithm keeps
constant over the replies that count, such as the sum of control variates, stays as it is.
`trimmed:s` (Yin et al.) and `geometric-median` (Pillutla et al.) take the place of the mean, and
are refused where a client's state is measured against the mean itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.protocol import Algorithm, Received, Turn, check

NONE, NORM, KRUM, TRIMMED, MEDIAN = "none", "norm", "krum", "trimmed", "geometric-median"
FORMS = (NONE, f"{NORM}:K", f"{KRUM}:f", f"{TRIMMED}:share", MEDIAN)
DEPLOYED = f"{NORM}:20"  # between machines: beyond honest replies, scripts/fed/honest_distances.py
LARGEST = 1e150  # whose square is finite
STEPS = 64  # of Weiszfeld's iteration
Usual = dict[str, float]
"""Of every field of a reply, the largest median distance of a round so far."""


@dataclass(frozen=True)
class Defence:
    """A rule against hostile replies, and its number."""

    rule: str = NONE
    value: float = 0.0

    @property
    def replaces_mean(self) -> bool:
        return self.rule in (TRIMMED, MEDIAN)

    def check_for(self, algorithm: Algorithm) -> None:
        """Refuse a rule that would break what the algorithm's convergence rests on."""
        check(
            not self.replaces_mean or algorithm.averages,
            f"{algorithm.name} does not go by the mean of its replies alone, so {self.rule} cannot "
            f"take its place; use {NORM}:K or {KRUM}:f.",
        )

    def keeps(self, replies: Received, usual: Usual | None = None) -> Tensor:
        """Which replies count, `[C]` boolean. usual is brought up to date."""
        views, usual = _views(replies), {} if usual is None else usual
        count = len(next(iter(replies.values()))) if replies else 0
        everyone = torch.ones(count, dtype=torch.bool)
        if not views or self.rule not in (NORM, KRUM):
            return everyone
        if self.rule == KRUM:
            scaled = [_in_sizes(view, _size(view)) for view in views.values()]
            return _krum(torch.cat(scaled, 1), int(self.value))
        if count < 3:  # of two that differ, nobody can say which is odd
            return everyone
        for name, view in views.items():
            length = float(view.median()) if isinstance(replies[name], list) else 0.0
            usual[name] = max(usual.get(name, 0.0), _size(view), length)
        far = [field_distances(v, usual[name]) > self.value for name, v in views.items()]
        return ~torch.stack(far).any(0)

    def combine(self, replies: Received) -> Received:
        """The replies with every row of a vector replaced by what stands for the mean."""
        if not self.replaces_mean:
            return replies
        whole = {n: rows for n, rows in replies.items() if isinstance(rows, Tensor)}
        vectors = {name: rows for name, rows in whole.items() if rows.is_floating_point()}
        means = {name: self.middle(rows) for name, rows in vectors.items()}
        return {**replies, **{name: mean.expand_as(vectors[name]) for name, mean in means.items()}}

    def middle(self, rows: Tensor) -> Tensor:
        """What stands for the mean of rows."""
        return trimmed_mean(rows, self.value) if self.rule == TRIMMED else geometric_median(rows)


UNDEFENDED = Defence()


def read_defence(text: str) -> Defence:
    """`norm:1000`, `krum:1`, `trimmed:0.2`, `geometric-median` or `none`."""
    rule, _, number = str(text).partition(":")
    known = f"{text!r} is no defence; there are {', '.join(FORMS)}."
    check(rule in (NONE, NORM, KRUM, TRIMMED, MEDIAN), known)
    if rule in (NONE, MEDIAN):
        check(not number, known)
        return Defence(rule)
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    allowed = {
        NORM: value > 1 and math.isfinite(value),
        KRUM: value >= 1 and value == math.floor(value),
        TRIMMED: 0 < value < 0.5,
    }
    check(allowed[rule], f"{text!r}: K is above 1, f whole and above 0, a share within (0, 0.5).")
    return Defence(rule, value)


def defend(
    defence: Defence, algorithm: Algorithm, replies: Received, turn: Turn, usual: Usual
) -> tuple[Tensor, Received, Turn]:
    """Which of the turn's replies count, those replies as the server is to see them, and the turn
    about their clients. A turn that needs everyone is left as it is. usual is what earlier turns
    have left, and is brought up to date."""
    kept = torch.ones(len(turn.clients), dtype=torch.bool)
    if defence.rule == NONE or algorithm.needs_everyone(turn):
        return kept, replies, turn
    if replies:
        kept = defence.keeps(replies, usual)
    chosen = {name: _choose(rows, kept) for name, rows in replies.items()}
    return kept, defence.combine(chosen), replace(turn, clients=turn.clients[kept])


def trimmed_mean(rows: Tensor, share: float) -> Tensor:
    """Coordinate by coordinate, without the given share of values at each end."""
    cut = min(math.ceil(share * len(rows)), (len(rows) - 1) // 2)
    ordered = rows.sort(dim=0).values
    return ordered[cut : len(rows) - cut].mean(0)


def geometric_median(rows: Tensor) -> Tensor:
    """The point with the smallest sum of distances to the rows, by Weiszfeld's iteration from the
    coordinate-wise median; half of the rows cannot move it far."""
    flat = rows.flatten(1).double().clamp(-LARGEST, LARGEST)
    point = flat.median(0).values
    for _ in range(STEPS):
        away = (flat - point).norm(dim=1)
        weight = 1 / away.clamp_min(1e-12 * (1 + float(away.median())))
        point = (weight.unsqueeze(1) * flat).sum(0) / weight.sum()
    return point.view(rows.shape[1:]).to(rows.dtype)


def field_distances(view: Tensor, size: float) -> Tensor:
    """How far every row is from the coordinate-wise median, in units of this size."""
    return _in_sizes(view, size).norm(dim=1)


def _choose(rows: Tensor | list[Tensor], kept: Tensor) -> Tensor | list[Tensor]:
    if isinstance(rows, Tensor):
        return rows[kept]
    return [row for row, keep in zip(rows, kept.tolist(), strict=True) if keep]


def _views(replies: Received) -> dict[str, Tensor]:
    """What replies are compared by, `[C, k]` each: every field of numbers that all have alike, and
    of lists that differ in length how long a vector they are."""
    views = {}
    for name, rows in replies.items():
        if isinstance(rows, list):
            sizes = [float(row.double().norm()) for row in rows]
            views[name] = torch.tensor(sizes, dtype=torch.float64).unsqueeze(1)
        elif rows.is_floating_point() and rows.numel():
            views[name] = rows.flatten(1).double()
    return views


def _size(view: Tensor) -> float:
    """The rows' median distance from the coordinate-wise median."""
    return min(float((view - view.median(0).values).norm(dim=1).median()), LARGEST)


def _in_sizes(view: Tensor, size: float) -> Tensor:
    """The rows' differences from the coordinate-wise median, in units of this size."""
    centre = view.median(0).values
    floor = 1e-9 * (1.0 + float(centre.norm()))  # rows that agree to the last digits
    return ((view - centre) / max(size, floor)).clamp(-LARGEST, LARGEST)


def _krum(rows: Tensor, hostile: int) -> Tensor:
    """All but the `hostile` rows with the largest sums of squared distances to their C - f - 2
    nearest neighbours; of equals, the first count."""
    count = len(rows)
    least = 2 * hostile + 3
    check(count >= least, f"krum:{hostile} needs {least} replies in a round; {count} came.")
    square = torch.stack([(rows - row).square().sum(1) for row in rows])
    nearest = square.sort(dim=1).values[:, 1 : count - hostile - 1]  # the first is itself
    order = nearest.sum(1).argsort(stable=True)
    return torch.zeros(count, dtype=torch.bool).index_fill(0, order[: count - hostile], True)
