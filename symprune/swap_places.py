"""Where exact swaps look: for every row, the few weights to grow and to prune that promise most.

`Anywhere` takes the best few of each from the whole row. `InGroups` stays inside the groups of an
N:M pattern and takes the best pair of the best few groups. Both know for every weight what flipping
it costs besides the term with c = G d (see `swap`), and are told which of the found were flipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.masks import Pattern


class Anywhere:
    """Any removed weight of a row may be swapped with any kept one."""

    paired = False

    def __init__(
        self, weight: Tensor, own: Tensor, keep: Tensor, shrink: float, candidates: int
    ) -> None:
        self.weight, self.own, self.shrink = weight, own, shrink
        self.few = min(candidates, weight.shape[1])
        # infinite where there is nothing to grow, to prune
        self.grow_own = ((1 - shrink) * own).masked_fill_(keep, torch.inf)
        self.prune_own = ((1 + shrink) * own).masked_fill_(~keep, torch.inf)

    def find(self, pull: Tensor) -> tuple[Tensor, Tensor]:
        """Columns and costs, `[rows, 2k]`: those to grow, then as many to prune."""
        grow = torch.addcmul(self.grow_own, self.weight, pull, value=-2)
        prune = torch.addcmul(self.prune_own, self.weight, pull, value=2)
        best = [cost.topk(self.few, dim=1, largest=False) for cost in (grow, prune)]
        self.found = torch.cat([each.indices for each in best], 1)
        return self.found, torch.cat([each.values for each in best], 1)

    def flip(self, flips: Tensor) -> None:
        """Those of the found that `flips` says are now the other way round."""
        row, place = flips.nonzero(as_tuple=True)
        column, grown = self.found[row, place], place < self.few
        prices = self.own[row, column]
        self.grow_own[row, column] = ((1 - self.shrink) * prices).masked_fill_(grown, torch.inf)
        self.prune_own[row, column] = ((1 + self.shrink) * prices).masked_fill_(~grown, torch.inf)

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
        (rows, columns), n, m = weight.shape, pattern.n, pattern.m
        groups = columns // m
        if (keep.view(rows, groups, m).sum(2) != n).any():
            raise SympruneError(f"The mask to be refined does not keep {pattern} everywhere.")
        self.weight, self.own, self.n, self.m = weight, own, n, m
        self.few = min(candidates, groups)
        # G between a column and those of its group
        inside = gram.view(groups, m, groups, m).diagonal(dim1=0, dim2=2)
        self.inside = inside.permute(2, 0, 1).reshape(columns, m)
        self.sign = weight.new_tensor([[1.0]] * n + [[-1.0]] * (m - n))
        self.ridge = 1 + shrink * self.sign
        kept = keep.nonzero()[:, 1].view(rows, groups, n)
        removed = (~keep).nonzero()[:, 1].view(rows, groups, m - n)
        self.order = torch.cat([kept, removed], 2).transpose(1, 2).contiguous()
        every_row = torch.arange(rows, device=weight.device).view(-1, 1, 1)
        self.signed, self.alone, self.cross = self._prices(every_row, self.order)

    def _prices(self, row: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of groups whose columns are `[..., m, groups]`: the weights, negative where removed; what
        flipping each costs besides the term with c; what each pair `[..., n, m - n, groups]` adds.
        """
        signed = self.weight[row, columns] * self.sign
        alone = self.own[row, columns] * self.ridge
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
        row, number = flips[:, : self.few].nonzero(as_tuple=True)
        group, (g, q) = group[row, number], place[row, :, number].T
        grown = self.order[row, g, group]
        self.order[row, g, group] = self.order[row, q, group]
        self.order[row, q, group] = grown
        columns = self.order[row, :, group].unsqueeze(2)
        signed, alone, cross = self._prices(row.view(-1, 1, 1), columns)
        self.signed[row, :, group] = signed.squeeze(2)
        self.alone[row, :, group] = alone.squeeze(2)
        self.cross[row, :, :, group] = cross.squeeze(3)

    def only(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.weight, self.own, self.order = self.weight[rows], self.own[rows], self.order[rows]
        self.signed, self.alone, self.cross = (
            each[rows] for each in (self.signed, self.alone, self.cross)
        )
