"""Base mask + statistics -> better mask, without training: DSnoT and R2-DSnoT (thesis 6.3.6).

Weights are exchanged one for one inside a row (inside a group of M for N:M patterns), so that the
row's expected error e = sum of W_i m_i over the pruned i moves towards zero; the number of weights
kept by every row is what it was. With C_i = W_i m_i:

    grow   the pruned i with the largest  sign(e) C_i / v_i^power,
    prune  the kept i with the smallest   |W_i| x_i   among those with sign(e) C_i < 0.

R2-DSnoT (Eq. 6.5, 6.6) multiplies either key by the relative importance D = 1/r + 1/c of the kept
weights, and adds gamma times a norm of the row. Taken literally that norm is the same number for
every candidate of a row and changes nothing; here it is the norm of the row after the exchange, the
reading under which gamma can matter. Eq. 6.5 also prints the grow key without the weight itself;
since the rule it modifies has it, D W m / v is the default and D m / v is `literal_growth`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.machine import host
from symprune.masks import Pattern, drop_ordered, keep_largest
from symprune.scores import inverse
from symprune.stats import MOMENTS, ChannelStats
from symprune.validation import (
    check_choice,
    check_finite,
    check_not_negative,
    check_positive,
)

PARTS = ("attn", "mlp", "all")
ACCEPT = ("published", "improving")
PRESETS = {
    # Thesis, Table E.4. Tables 6.5 and E.4 carry each other's perplexities for the two bases (18.99
    # and 20.50), so the labels of one of them may be swapped: either preset goes with any base.
    "wanda": {"grow_relative": True, "prune_relative": False, "gamma1": 0.0, "gamma2": 1e-4},
    "ria": {"grow_relative": False, "prune_relative": True, "gamma1": 0.0, "gamma2": 1e-3},
}
RELATIVE_METHODS = ("ria", "stochria", "ri", "lp", "col-sum", "row-sum", "symwanda")
TINY = 1e-30
ROWS_AT_ONCE = 256  # temporaries of so many rows stay in a CPU's cache
ROWS_AT_ONCE_ELSEWHERE = 4096
SIDES = {0: 1.0, 1: -1.0}  # lists for e > 0, lists for e <= 0: their place, and the sign of e


class Statistics(Protocol):
    """What refinement asks of a layer's input statistics: x, m and v."""

    @property
    def norm(self) -> Tensor: ...
    @property
    def mean(self) -> Tensor: ...
    @property
    def variance(self) -> Tensor: ...


@dataclass(frozen=True)
class Keys:
    """How candidates are ordered; the defaults are DSnoT's."""

    var_power: float = 1.0
    alpha: float = 1.0
    grow_relative: bool = False
    prune_relative: bool = False
    gamma1: float = 0.0
    gamma2: float = 0.0
    norm_p: float = 2.0
    literal_growth: bool = False


@dataclass(frozen=True)
class DSnoT:
    """DSnoT (thesis 6.3.6): exchanges that bring each row's expected error towards zero.

    layers: which part of a block is refined; the published default leaves the MLP alone. accept:
    `published` makes every exchange, `improving` only those that shrink the error.
    """

    name: ClassVar[str] = "dsnot"
    needs: ClassVar[str] = MOMENTS
    layers: str = "attn"
    max_cycles: int = 50
    update_threshold: float = 0.1
    var_power: float = 1.0
    same_sign: bool = False
    accept: str = "improving"

    def __post_init__(self) -> None:
        check_choice("layers", self.layers, PARTS)
        check_choice("accept", self.accept, ACCEPT)
        check_positive(max_cycles=self.max_cycles)
        check_not_negative(update_threshold=self.update_threshold)
        check_finite(var_power=self.var_power)

    def keys(self, base: str) -> Keys:
        return Keys(var_power=self.var_power)

    def __call__(
        self, weight: Tensor, keep: Tensor, stats: ChannelStats, pattern: Pattern | None, base: str
    ) -> Tensor:
        """The refined mask of a matrix whose base mask was made by the method `base`."""
        return dsnot(
            weight,
            keep,
            stats,
            keys=self.keys(base),
            max_cycles=self.max_cycles,
            update_threshold=self.update_threshold,
            same_sign=self.same_sign,
            accept=self.accept,
            pattern=pattern,
        )


@dataclass(frozen=True)
class R2DSnoT(DSnoT):
    """R2-DSnoT (Eq. 6.5, 6.6): relative importance in growing or pruning, and a regulariser.

    preset: `wanda` or `ria`, the two best settings of Table E.4; left out, it follows the base
    method. Options that are given replace the preset's. alpha is the power of the input norm in the
    relative prune key: 0.5 in Table 6.5, 1 as in DSnoT, 2 for "squared activation".
    """

    name: ClassVar[str] = "r2-dsnot"
    preset: str | None = None
    grow_relative: bool | None = None
    prune_relative: bool | None = None
    gamma1: float | None = None
    gamma2: float | None = None
    norm_p: float = 2.0
    alpha: float = 0.5
    literal_growth: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset is not None:
            check_choice("preset", self.preset, tuple(PRESETS))
        check_finite(gamma1=self.gamma1, gamma2=self.gamma2, alpha=self.alpha)
        if not self.norm_p >= 1:
            raise SympruneError(f"norm_p must be at least 1 (inf is one), not {self.norm_p}.")

    def keys(self, base: str) -> Keys:
        preset = PRESETS[self.preset or ("ria" if base in RELATIVE_METHODS else "wanda")]
        given = {name: getattr(self, name) for name in preset if getattr(self, name) is not None}
        return Keys(
            var_power=self.var_power,
            alpha=self.alpha,
            norm_p=self.norm_p,
            literal_growth=self.literal_growth,
            **{**preset, **given},
        )


def dsnot(
    weight: Tensor,
    keep: Tensor,
    stats: Statistics,
    *,
    keys: Keys = Keys(),  # noqa: B008 - frozen
    max_cycles: int = 50,
    update_threshold: float = 0.1,
    same_sign: bool = False,
    accept: str = "published",
    pattern: Pattern | None = None,
) -> Tensor:
    """The keep-mask after at most `max_cycles` exchanges in every row of `weight` (`[out, in]`).

    A row goes on while |e| > update_threshold and, with `same_sign`, while an exchange does not
    turn e over. accept: `published` makes every exchange, as the reference does; `improving` only
    those after which |e| is smaller. A row that runs out of candidates stops.
    """
    weight = weight.float()
    rows = _Rows(weight, keep.clone(), stats, keys, max_cycles, pattern)
    start = torch.sign(rows.error)
    active = torch.arange(len(weight), device=weight.device)
    going = torch.ones_like(active, dtype=torch.bool)
    look_every = host.steps_between_looks(weight.device)
    for cycle in range(max_cycles):
        error = rows.error[active]
        going = going & (error.abs() > update_threshold)
        if cycle % look_every == 0:
            count = int(going.sum())
            if not count:
                break
            on = host.first_true(going, count)
            active, error, going = active[on], error[on], going[on]
        grown, pruned, found, exhausted = rows.candidates(active)
        change = rows.contribution(active, pruned) - rows.contribution(active, grown)
        after = error + change
        fits = found
        if accept == "improving":
            fits = fits & (after.abs() < error.abs())
        if same_sign:
            fits = fits & (torch.sign(after) == start[active])
            exhausted = exhausted | (found & ~fits)
        rows.exchange(active, grown, pruned, after, fits & going)
        going = going & ~exhausted
    return rows.keep


class _Rows:
    """The state of all rows: masks, errors, and how far each has read its candidate lists.

    Only the first `cycles` candidates of an order can ever be read, so only those are selected, and
    those for the other sign of e only for rows whose error turns over. An accelerator selects all
    at once: to ask it for those rows would take longer.
    """

    def __init__(
        self,
        weight: Tensor,
        keep: Tensor,
        stats: Statistics,
        keys: Keys,
        cycles: int,
        pattern: Pattern | None,
    ) -> None:
        self.weight, self.keep, self.keys, self.pattern = weight, keep, keys, pattern
        self.base = keep.clone()
        self.mean, self.norm = stats.mean.float(), stats.norm.float()
        self.spread = stats.variance.float().clamp(min=TINY) ** keys.var_power
        self.error = ((weight * ~keep) @ self.mean.unsqueeze(1)).squeeze(1)
        self.cycles = min(cycles, weight.shape[1])
        self.relative = self._relative() if keys.grow_relative or keys.prune_relative else None
        count = len(weight)
        shape = (2, count, self.cycles)
        self.grow_list = torch.empty(shape, dtype=torch.long, device=weight.device)
        self.prune_list = torch.empty_like(self.grow_list)
        self.grow_length = torch.zeros((2, count), dtype=torch.long, device=weight.device)
        self.prune_length = torch.zeros_like(self.grow_length)
        self.listed = torch.zeros((2, count), dtype=torch.bool, device=weight.device)
        self.grow_next = torch.zeros_like(self.grow_length)
        self.prune_next = torch.zeros_like(self.grow_length)
        self.lists_all = weight.device.type != "cpu"
        if self.lists_all:
            for rows in torch.arange(count, device=weight.device).split(ROWS_AT_ONCE_ELSEWHERE):
                for side in SIDES:
                    self._select(rows, side)

    def contribution(self, rows: Tensor, columns: Tensor) -> Tensor:
        """C of one entry per row."""
        return self.weight[rows, columns] * self.mean[columns]

    def candidates(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For each row what to grow, what to prune, whether both exist, whether it must stop."""
        side = (self.error[rows] <= 0).long()
        if not self.lists_all:
            self._list(rows, side)
        grow_at, prune_at = self.grow_next[side, rows], self.prune_next[side, rows]
        has_grow = grow_at < self.grow_length[side, rows]
        grown = self.grow_list[side, rows, grow_at.clamp(max=self.cycles - 1)]
        self.grow_next[side, rows] += 1
        if self.pattern is None:
            has_prune = prune_at < self.prune_length[side, rows]
            pruned = self.prune_list[side, rows, prune_at.clamp(max=self.cycles - 1)]
            self.prune_next[side, rows] += 1
            found = has_grow & has_prune
            return grown.where(found, 0), pruned.where(found, 0), found, ~found
        grown = grown.where(has_grow, 0)
        pruned, has_prune = self._in_group(rows, grown, side)
        return grown, pruned, has_grow & has_prune, ~has_grow

    def exchange(
        self, rows: Tensor, grown: Tensor, pruned: Tensor, error: Tensor, fits: Tensor
    ) -> None:
        """Grow and prune one weight each of the rows where it fits."""
        self.keep[rows, grown] |= fits
        self.keep[rows, pruned] &= ~fits
        self.error[rows] = torch.where(fits, error, self.error[rows])

    def _list(self, rows: Tensor, side: Tensor) -> None:
        """Select the candidates of the rows that come to a side for the first time."""
        for which in SIDES:
            new = rows[(side == which) & ~self.listed[which, rows]]
            self.listed[which, new] = True
            for some in new.split(ROWS_AT_ONCE):
                self._select(some, which)

    def _select(self, rows: Tensor, side: int) -> None:
        grow_key, prune_key = self._keys(rows, SIDES[side])
        columns, length = _select_first(grow_key, self.cycles)
        self.grow_list[side, rows], self.grow_length[side, rows] = columns, length
        if self.pattern is None:
            columns, length = _select_first(prune_key.neg_(), self.cycles)
            self.prune_list[side, rows], self.prune_length[side, rows] = columns, length

    def _keys(self, rows: Tensor, sign: float) -> tuple[Tensor, Tensor]:
        """Keys of some rows: -inf where nothing can be grown, inf where nothing can be pruned."""
        keys, weight, base = self.keys, self.weight[rows], self.base[rows]
        helps = weight * (sign * self.mean)  # sign(e) C: growing helps where > 0, pruning where < 0
        if keys.literal_growth and keys.grow_relative:
            grow = (sign * self.mean / self.spread).repeat(len(rows), 1)
        else:
            grow = helps / self.spread
        power = keys.alpha if keys.prune_relative else 1.0
        prune = weight.abs().mul_(self.norm**power)
        if self.relative is not None:
            importance = self.relative[0][rows] + self.relative[1]
            grow = grow.mul_(importance) if keys.grow_relative else grow
            prune = prune.mul_(importance) if keys.prune_relative else prune
        if keys.gamma1:
            grow += keys.gamma1 * norm_after(weight, base, keys.norm_p, grow=True)
        if keys.gamma2:
            prune += keys.gamma2 * norm_after(weight, base, keys.norm_p, grow=False)
        grow.masked_fill_(base | (helps <= 0), -torch.inf)
        return grow, prune.masked_fill_(~base | (helps >= 0), torch.inf)

    def _in_group(self, rows: Tensor, grown: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
        """What to prune in the group of M that `grown` is in: the cheapest kept one that helps."""
        assert self.pattern is not None
        m = self.pattern.m
        start = grown // m * m
        columns = start.unsqueeze(1) + torch.arange(m, device=grown.device)
        sign = torch.where(side == 0, 1.0, -1.0).unsqueeze(1)
        weight = self.weight[rows.unsqueeze(1), columns]
        helps = sign * weight * self.mean[columns]
        prune = weight.abs() * self.norm[columns]
        if self.keys.prune_relative and self.relative is not None:
            importance = self.relative[0][rows] + self.relative[1][columns]
            prune = weight.abs() * importance * self.norm[columns] ** self.keys.alpha
        if self.keys.gamma2:
            kept = (self.weight * self.base)[rows]
            norm = torch.linalg.vector_norm(kept, ord=self.keys.norm_p, dim=1, keepdim=True)
            prune = prune + self.keys.gamma2 * _norm_without(weight, norm, kept, self.keys.norm_p)
        free = self.base[rows.unsqueeze(1), columns] & self.keep[rows.unsqueeze(1), columns]
        prune = prune.masked_fill(~free | (helps >= 0), torch.inf)
        value, place = prune.min(dim=1)
        return start + place, torch.isfinite(value)

    def _relative(self) -> tuple[Tensor, Tensor]:
        """1/||W~_o:||_1 as a column and 1/||W~_:i||_1 as a row, over the kept weights."""
        kept = (self.weight * self.keep).abs()
        return inverse(kept.sum(1, keepdim=True)), inverse(kept.sum(0))


def _select_first(key: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The columns of the `count` largest keys of each row, best first, and how many are candidates.
    Equal keys come in the order of their index."""
    columns = _select_largest(key, count).sort(dim=1).values
    values, order = key.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return columns.gather(1, order), (values > -torch.inf).sum(1)


def _select_largest(key: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest keys of each row, of equals those of lower index.

    `topk` may take any of several equals at the end of its list, so a row where that is in question
    is selected again, exactly: all rows on an accelerator, which is not asked for these few.
    """
    if key.device.type != "cpu":
        exact = drop_ordered(key.flip(1), key.shape[1] - count).flip(1)
        return exact.to(torch.uint8).topk(count, dim=1).indices
    values, columns = key.topk(min(count + 1, key.shape[1]), dim=1, sorted=True)
    if values.shape[1] > count:
        last, beyond = values[:, count - 1], values[:, count]
        doubtful = ((last == beyond) & (last > -torch.inf)).nonzero().squeeze(1)
        columns = columns[:, :count]
        if doubtful.numel():
            exact = keep_largest(key[doubtful].flip(1), count).flip(1)
            columns[doubtful] = exact.nonzero()[:, 1].view(-1, count)
    return columns


def norm_after(weight: Tensor, keep: Tensor, p: float, grow: bool) -> Tensor:
    """For every entry, the p-norm of the row's kept weights once it is grown or pruned."""
    kept = weight * keep
    norm = torch.linalg.vector_norm(kept, ord=p, dim=1, keepdim=True)
    if not grow:
        return _norm_without(weight, norm, kept, p)
    if p == torch.inf:
        return torch.maximum(norm.expand_as(weight), weight.abs())
    return (norm**p + weight.abs() ** p) ** (1 / p)


def _norm_without(weight: Tensor, norm: Tensor, kept: Tensor, p: float) -> Tensor:
    """The p-norm of a row whose kept weights `kept` have the p-norm `norm`, without one of them."""
    if p == torch.inf:
        largest = kept.abs().topk(min(2, kept.shape[1]), dim=1).values
        second = largest[:, 1:] if largest.shape[1] > 1 else torch.zeros_like(norm)
        return torch.where(weight.abs() >= norm, second, norm)
    return (norm**p - weight.abs() ** p).clamp(min=0) ** (1 / p)
