"""Exact refinement: one-for-one swaps that lower the layer's true error on the calibration data.

With d what a row has lost and G = X^T X, the row's error is ||X d||^2 = d^T G d. Keeping c = G d,

    growing g changes it by  -2 w_g c_g + w_g^2 G_gg,
    pruning q by              2 w_q c_q + w_q^2 G_qq,
    both together by the sum of the two and  -2 w_g w_q G_gq.

Every step takes the best few of each, evaluates all their pairs exactly and makes the best swap if
it lowers the error; rows that cannot improve drop out. DSnoT steers by the mean of the error
instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.masks import Pattern

ROWS_AT_ONCE = 512
SMALLEST_GAIN = 1e-6  # of a row's error; below lies rounding


def swap(
    weight: Tensor,
    keep: Tensor,
    gram: Tensor,
    *,
    max_swaps: int = 60,
    candidates: int = 8,
    pattern: Pattern | None = None,
) -> Tensor:
    """The keep-mask after at most `max_swaps` swaps in every row of `weight` (`[out, in]`).

    Every row keeps as many as before; with a pattern both sides of a swap lie in one group of M.
    """
    gram = gram.to(weight.device)
    parts = [
        _swap_rows(weight[rows].float(), keep[rows].clone(), gram, max_swaps, candidates, pattern)
        for rows in torch.arange(len(weight), device=weight.device).split(ROWS_AT_ONCE)
    ]
    return torch.cat(parts)


def _swap_rows(
    weight: Tensor,
    keep: Tensor,
    gram: Tensor,
    max_swaps: int,
    candidates: int,
    pattern: Pattern | None,
) -> Tensor:
    result = keep.clone()
    lost = weight * ~keep
    pull = lost @ gram
    error = (lost * pull).sum(1)
    own = weight**2 * gram.diagonal()
    rows = torch.arange(len(weight), device=weight.device)
    for _ in range(max_swaps):
        linear = 2 * weight * pull
        grow = (own - linear).masked_fill_(keep, torch.inf)
        prune = (own + linear).masked_fill_(~keep, torch.inf)
        if pattern is None:
            change, grown, pruned = _best_pair(weight, grow, prune, gram, candidates)
        else:
            change, grown, pruned = _best_in_group(weight, grow, prune, gram, pattern)
        better = change < -SMALLEST_GAIN * error
        if not better.any():
            break
        if not better.all():
            rows, weight, keep, pull = rows[better], weight[better], keep[better], pull[better]
            error, own = error[better], own[better]
            change, grown, pruned = change[better], grown[better], pruned[better]
        here = torch.arange(len(rows), device=rows.device)
        keep[here, grown], keep[here, pruned] = True, False
        result[rows, grown], result[rows, pruned] = True, False
        pull += weight[here, pruned].unsqueeze(1) * gram[pruned]
        pull -= weight[here, grown].unsqueeze(1) * gram[grown]
        error = error + change
    return result


def _best_pair(
    weight: Tensor, grow: Tensor, prune: Tensor, gram: Tensor, candidates: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The exact best pair among the best few to grow and the best few to prune, per row."""
    few = min(candidates, weight.shape[1])
    grow_change, g = grow.topk(few, dim=1, largest=False)
    prune_change, q = prune.topk(few, dim=1, largest=False)
    both = weight.gather(1, g).unsqueeze(2) * weight.gather(1, q).unsqueeze(1)
    change = grow_change.unsqueeze(2) + prune_change.unsqueeze(1)
    change -= 2 * both * gram[g.unsqueeze(2), q.unsqueeze(1)]
    best, place = change.flatten(1).min(dim=1)
    row = torch.arange(len(weight), device=weight.device)
    return best, g[row, place // few], q[row, place % few]


def _best_in_group(
    weight: Tensor, grow: Tensor, prune: Tensor, gram: Tensor, pattern: Pattern
) -> tuple[Tensor, Tensor, Tensor]:
    """The best pair of all that lie in one group of M, per row."""
    rows, columns = weight.shape
    m = pattern.m
    groups = weight.view(rows, -1, m)
    blocks = gram.view(columns // m, m, columns // m, m).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    change = grow.view(rows, -1, m, 1) + prune.view(rows, -1, 1, m)
    change -= 2 * groups.unsqueeze(3) * groups.unsqueeze(2) * blocks
    best, place = change.flatten(1).min(dim=1)
    group, inside = place // (m * m), place % (m * m)
    return best, group * m + inside // m, group * m + inside % m
