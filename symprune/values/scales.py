"""Which scale suits the weights of a group, and weights rounded to the nearest of their grid."""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.values.grid import GROUP, Grid, OnGrid, in_groups, per_scale, spread

SHRUNK = tuple(1 - 0.04 * step for step in range(16))
"""A scale at which the largest weight is the largest level is tried, and so many shorter ones."""
AT_ONCE = 2**20  # weights


def round_scale(scale: Tensor) -> Tensor:
    """As a scale is stored, in fp32."""
    return scale.to(torch.bfloat16).float()


def choose_scales(
    weight: Tensor, keep: Tensor | None, grid: Grid, importance: Tensor | None = None
) -> Tensor:
    """`[out, groups]`, fp32: of some scales the one at which rounding to the nearest errs least.

    importance: what a column's squared error counts for; left out, all count the same.
    """
    found = torch.empty(len(weight), -(-weight.shape[1] // GROUP), device=weight.device)
    some = max(1, AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), some):
        rows = slice(start, start + some)
        kept = None if keep is None else keep[rows]
        found[rows] = _choose(weight[rows], kept, grid, importance)
    return found


def _choose(weight: Tensor, keep: Tensor | None, grid: Grid, importance: Tensor | None) -> Tensor:
    counts = torch.ones_like(weight[:1]) if importance is None else importance.unsqueeze(0)
    counts = in_groups(counts.expand_as(weight) if keep is None else counts * keep)
    grouped = in_groups(weight.float() if keep is None else weight.float() * keep)
    whole = grouped.abs().amax(-1, keepdim=True) / -grid.least
    chosen, least = round_scale(whole), torch.full_like(whole, torch.inf)
    for factor in (sign * each for each in SHRUNK for sign in grid.signs):
        scale = round_scale(whole * factor)
        lost = grid.nearest(grouped * per_scale(scale)).mul_(scale).sub_(grouped)
        error = lost.square_().mul_(counts).sum(-1, keepdim=True)
        better = error < least
        chosen, least = torch.where(better, scale, chosen), torch.where(better, error, least)
    return chosen.squeeze(-1)


def nearest_levels(weight: Tensor, scales: Tensor, grid: Grid) -> Tensor:
    return grid.nearest(weight.float() * per_scale(spread(scales, weight.shape[1])))


def round_to_grid(weight: Tensor, grid: Grid, keep: Tensor | None = None) -> OnGrid:
    """Every weight to the nearest of its group's grid; a matrix on it and no statistics needed.

    Some rows at a time: a vocabulary's embeddings are no small matrix.
    """
    scales = choose_scales(weight, keep, grid)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    some = max(1, AT_ONCE // weight.shape[1])
    for start in range(0, len(weight), some):
        rows = slice(start, start + some)
        codes[rows] = grid.codes(nearest_levels(weight[rows], scales[rows], grid))
    if keep is not None:
        codes.masked_fill_(~keep, 0)
    return OnGrid(codes, scales.to(torch.bfloat16), grid)
