"""Where exact swaps look: for every row, the few weights to grow and to prune that promise most.

`Anywhere` takes the best few of each from the whole row. `InGroups` stays inside the groups of an
N:M pattern and takes the best pair of the best few groups. Both know for every weight what flipping
it costs besides the term with c = G d (see `swap`), and are told which of the found were flipped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from symprune.errors import SympruneError
from symprune.masks import Pattern, count_true


def check_pattern(keep: Tensor, pattern: Pattern) -> None:
    """Fail where a mask does not keep N of every M."""
    if (count_true(keep.reshape(len(keep), -1, pattern.m)) != pattern.n).any():
        raise SympruneError(f"The mask to be refined does not keep {pattern} everywhere.")


class Anywhere:
    """Any removed weight of a row may be swapped with any kept one."""

    paired = False

    def __init__(
        self, weight: Tensor, own: Tensor, keep: Tensor, shrink: float, candidates: int
    ) -> None:
        self.weight, self.own, self.shrink = weight, own, shrink
        self.few = min(candidates, weight.shape[1])
        # infinite where there is nothing to grow, to prune; one column more than there are, for
        # what need not be written
        self.grow_own = F.pad(((1 - shrink) * own).masked_fill_(keep, torch.inf), (0, 1))
        self.prune_own = F.pad(((1 + shrink) * own).masked_fill_(~keep, torch.inf), (0, 1))
        self.grown = torch.arange(2 * self.few, device=weight.device) < self.few

    def find(self, pull: Tensor) -> tuple[Tensor, Tensor]:
        """Columns and costs, `[rows, 2k]`: those to grow, then as many to prune."""
        grow = torch.addcmul(self.grow_own[:, :-1], self.weight, pull, value=-2)
        prune = torch.addcmul(self.prune_own[:, :-1], self.weight, pull, value=2)
        best = [cost.topk(self.few, dim=1, largest=False) for cost in (grow, prune)]
        self.found = torch.cat([each.indices for each in best], 1)
        return self.found, torch.cat([each.values for each in best], 1)

    def flip(self, flips: Tensor) -> None:
        """Those of the found that `flips` says are now the other way round."""
        prices = self.own.gather(1, self.found)
        column = self.found.where(flips, self.own.shape[1])
        grow = ((1 - self.shrink) * prices).masked_fill_(self.grown, torch.inf)
        prune = ((1 + self.shrink) * prices).masked_fill_(~self.grown, torch.inf)
        self.grow_own.scatter_(1, column, grow)
        self.prune_own.scatter_(1, column, prune)

    def only(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.weight, self.own = self.weight[rows], self.own[rows]
        self.grow_own, self.prune_own = self.grow_own[rows], self.prune_own[rows]


class InGroups:
    """A removed weight may be swapped with a kept one of its group of M.

    The columns of a group are listed with the kept ones first, `order`, so that only pairs that can
    be swapped are looked at. All state is `[rows, place in the group, group]`: the i-th of all
    groups lie side by side in memory.
    """

    paired = True

    def __init__(
        self,
        weight: Tensor,
        own: Tensor,
        keep: Tensor,
        shrink: float,
        candidates: int,
        gram: Tensor,
        pattern: Pattern,
    ) -> None:
        columns, n, m = weight.shape[1], pattern.n, pattern.m
        groups = columns // m
        self.weight, self.own, self.n, self.m = weight, own, n, m
        self.few = min(candidates, groups)
        self.grown = torch.arange(2 * self.few, device=weight.device) < self.few
        # G between a column and those of its group
        inside = gram.view(groups, m, groups, m).diagonal(dim1=0, dim2=2)
        self.inside = inside.permute(2, 0, 1).reshape(columns, m)
        places = torch.arange(m, device=weight.device).unsqueeze(1)
        self.sign = torch.where(places < n, 1.0, -1.0).to(weight.dtype)
        self.ridge = 1 + shrink * self.sign
        self.order = _order_kept_first(keep, n, m)
        self.signed, self.alone, self.cross = self._prices(self.order)

    def _prices(self, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of groups whose columns are `[..., m, groups]`: the weights, negative where removed; what
        flipping each costs besides the term with c; what each pair `[..., n, m - n, groups]` adds.
        """
        own, weight = (
            each.gather(1, columns.flatten(1)).view_as(columns) for each in (self.own, self.weight)
        )
        signed, alone = weight * self.sign, own * self.ridge
        kept, removed = columns[:, : self.n].unsqueeze(2), columns[:, self.n :].unsqueeze(1)
        cross = self.inside[kept, removed % self.m]
        cross *= 2 * signed[:, : self.n].unsqueeze(2)
        return signed, alone, cross.mul_(signed[:, self.n :].unsqueeze(1))

    def find(self, pull: Tensor) -> tuple[Tensor, Tensor]:
        """Columns and costs, `[rows, 2k]`: the i-th to grow goes with the i-th to prune."""
        pulled = pull.gather(1, self.order.flatten(1)).view_as(self.order)
        cost = torch.addcmul(self.alone, self.signed, pulled, value=2)
        best = torch.full_like(cost[:, 0], torch.inf)
        for q in range(self.n):
            partner = (self.cross[:, q] + cost[:, self.n :]).amin(1)
            best = torch.minimum(best, partner.add_(cost[:, q]))
        group = best.topk(self.few, dim=1, largest=False).indices
        place = self._best_pair(cost, group)
        columns, costs = (
            each.gather(2, group.unsqueeze(1).expand(-1, self.m, -1)).gather(1, place).flatten(1)
            for each in (self.order, cost)
        )
        self.found = group, place
        return columns, costs

    def _best_pair(self, cost: Tensor, group: Tensor) -> Tensor:
        """Where in its group the one to grow and the one to prune are, `[rows, 2, few]`."""
        few, others = group.unsqueeze(1), self.m - self.n
        cost = cost.gather(2, few.expand(-1, self.m, -1))
        cross = self.cross.flatten(1, 2)
        change = cross.gather(2, few.expand(-1, cross.shape[1], -1))
        change += cost[:, : self.n].repeat_interleave(others, 1)
        change += cost[:, self.n :].repeat(1, self.n, 1)
        pair = change.argmin(1)
        return torch.stack([self.n + pair % others, pair // others], 1)

    def flip(self, flips: Tensor) -> None:
        """Those of the found that `flips` says are now the other way round."""
        group, place = self.found
        group = group.unsqueeze(1)
        order = self.order.gather(2, group.expand(-1, self.m, -1))
        pair = order.gather(1, place)
        order.scatter_(1, place, pair.where(~flips[:, None, : self.few], pair.flip(1)))
        signed, alone, cross = self._prices(order)
        parts = (self.order, order), (self.signed, signed), (self.alone, alone), (self.cross, cross)
        for whole, part in parts:
            flat = part.flatten(1, -2)
            whole.flatten(1, -2).scatter_(2, group.expand_as(flat), flat)

    def only(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.weight, self.own, self.order = self.weight[rows], self.own[rows], self.order[rows]
        self.signed, self.alone, self.cross = (
            each[rows] for each in (self.signed, self.alone, self.cross)
        )


def _order_kept_first(keep: Tensor, n: int, m: int) -> Tensor:
    """The columns of every group of M, the kept ones first: `[rows, m, groups]`."""
    rows, columns = keep.shape
    kept = keep.view(rows, -1, m).transpose(1, 2)
    place = torch.where(kept, kept.cumsum(1), n + (~kept).cumsum(1)).sub_(1)
    column = torch.arange(columns, device=keep.device).view(-1, m).T.expand_as(place)
    order = torch.empty(place.shape, dtype=torch.long, device=keep.device)
    return order.scatter_(1, place, column)
