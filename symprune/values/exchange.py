"""Mask and codes found together: sweeps in which removed weights may come back for kept ones.

A mask that was made for weights with many digits is not the best one for few levels. Here every
weight, kept or not, has a price to pay in each sweep: it stays if it lowers its row's error by more
than that. The price is the one at which, as things are, the right number would stay; at the end the
mask keeps exactly as many as before, of every row or, with N:M, of every M.
"""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.scores import inverse
from symprune.update.damped_gram import DampedGram
from symprune.values.descent import Rows, descend_rows, falls, gain, weights_of
from symprune.values.gptq import Found, row_by_row
from symprune.values.grid import Grid, per_scale, spread

SETTLING = 2  # sweeps under the new mask


def exchange(
    weight: Tensor,
    keep: Tensor,
    gram: DampedGram,
    grid: Grid,
    start: Found,
    sweeps: int,
    among: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mask, levels and scales: in each row those of the start, or others that err less. Of every
    `among` columns (left out: of all) as many stay as did."""
    size = weight.shape[1] if among is None else among

    def improve(rows: slice) -> tuple[Tensor, ...]:
        there = start[0][rows], start[1][rows]
        return _exchange(weight[rows], keep[rows], gram, grid, there, sweeps, size)

    mask, levels, scales = row_by_row(weight, improve)
    return mask, levels, scales


def _exchange(
    weight: Tensor,
    keep: Tensor,
    gram: DampedGram,
    grid: Grid,
    start: Found,
    sweeps: int,
    size: int,
) -> tuple[Tensor, ...]:
    rows, dropped = Rows.begin(weight, keep, gram, start), (~keep).reshape(-1, size).sum(1)
    for _ in range(sweeps):
        gains, _ = _look(rows, gram, grid)
        rows.sweep(gram, grid, _price(gains, dropped, size))
    gains, levels = _look(rows, gram, grid)
    chosen = _keep_highest(gains, dropped, size)
    there = torch.where(rows.kept.T > 0, rows.levels.T, levels), rows.scales.T
    found = descend_rows(weight, chosen, gram, grid, there, SETTLING)
    better = falls(weight, weights_of(start, keep), weights_of(found, chosen), gram)
    pairs = ((chosen, keep), (found[0], start[0]), (found[1], start[1]))
    return tuple(torch.where(better, new, old) for new, old in pairs)


def _look(rows: Rows, gram: DampedGram, grid: Grid) -> Found:
    """For each weight, all others as they are: what it gains at its best level, and that level."""
    diagonal = gram.diagonal.unsqueeze(1)
    scale = spread(rows.scales.T, len(rows.levels)).T
    best = torch.addcmul(rows.fitted, rows.pull, inverse(diagonal))
    levels = grid.nearest(best * per_scale(scale))
    return gain(diagonal, best, levels * scale).T, levels.T


def _price(gains: Tensor, dropped: Tensor, size: int) -> Tensor:
    """`[in, out]`: between the gain of the last weight to go and that of the first to stay, and
    never below zero, where a weight does harm."""
    ordered = gains.reshape(-1, size).sort(1).values
    open_ended = torch.nn.functional.pad(ordered, (1, 1), value=torch.inf)
    open_ended[:, 0] = -torch.inf
    around = torch.stack([dropped, dropped + 1], 1)
    price = open_ended.gather(1, around).mean(1, keepdim=True).clamp_(min=0)
    return price.expand(-1, size).reshape(gains.shape).T


def _keep_highest(gains: Tensor, dropped: Tensor, size: int) -> Tensor:
    """All but the `dropped` lowest of every group; of equals the first go."""
    order = gains.reshape(-1, size).sort(dim=1, stable=True).indices
    stays = torch.arange(size, device=gains.device) >= dropped.unsqueeze(1)
    return torch.empty_like(stays).scatter_(1, order, stays).reshape(gains.shape)
