"""Coordinate descent on a grid: codes and scales that lower a layer's error, one after the other.

A row's error is (w - q)^T H (w - q), with w the dense weights, q those on the grid and H = G + R
(`DampedGram`). With the pull p = H (w - q), weight j alone would best be q_j + p_j / H_jj; of its
levels the nearest to that is the best one, so no step raises the error. Group by group, its columns
take their turn in all rows at once, then each row's scale, whose best value given the levels l is
s + l^T p / l^T H l; one product tells the other groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.scores import inverse
from symprune.update.damped_gram import DampedGram
from symprune.values.gptq import Found, Spreading, gptq, row_by_row
from symprune.values.grid import Grid, groups_of, spread
from symprune.values.scales import choose_scales, nearest_levels, round_scale


def find_start(weight: Tensor, fitted: Tensor, keep: Tensor, gram: DampedGram, grid: Grid) -> Found:
    """Of the fitted weights' nearest and what GPTQ makes of them, for each row the better one."""
    scales = choose_scales(fitted, keep, grid, gram.diagonal)
    near = nearest_levels(fitted, scales, grid), scales
    loop = gptq(fitted, keep, Spreading.along(gram), grid)
    errors = [gram.error(weight - _dense(found, keep)) for found in (near, loop)]
    # Where the Hessian has no inverse, GPTQ's error is not a number, and not smaller.
    better = (errors[1] < errors[0]).unsqueeze(1)
    return torch.where(better, loop[0], near[0]), torch.where(better, loop[1], near[1])


def descend(
    weight: Tensor, keep: Tensor, gram: DampedGram, grid: Grid, start: Found, sweeps: int
) -> Found:
    """From a start, after some sweeps over all columns. No row's error rises."""

    def improve(rows: slice) -> Found:
        there = start[0][rows], start[1][rows]
        return _descend(weight[rows], keep[rows], gram, grid, there, sweeps)

    return row_by_row(weight, improve)


def _descend(
    weight: Tensor, keep: Tensor, gram: DampedGram, grid: Grid, start: Found, sweeps: int
) -> Found:
    before = _dense(start, keep)
    pulled = gram.pull(weight - before)
    kept, scales = keep.T.float(), start[1].T.clone()  # here a column is a row
    levels, fitted, pull = start[0].T * kept, before.T.contiguous(), pulled.T.contiguous()
    for _ in range(sweeps):
        for number, columns in enumerate(groups_of(len(levels))):
            was = fitted[columns].clone()
            scales[number] = _improve_group(
                levels[columns], fitted[columns], pull[columns], kept[columns],
                scales[number], gram.square(columns), grid,
            )  # fmt: skip
            change = fitted[columns] - was
            for others in (slice(columns.start), slice(columns.stop, None)):
                pull[others].addmm_(gram.gram[others, columns], change, alpha=-1)
    found = levels.T, scales.T
    after = _dense(found, keep)
    # The error fell by the change times the sum of the pulls before and after it. The last pull is
    # made anew: in the one that was kept up to date, roundings have added up.
    gained = (after - before) * (pulled + gram.pull(weight - after))
    fell = gained.sum(1, keepdim=True) > 0
    return torch.where(fell, found[0], start[0]), torch.where(fell, found[1], start[1])


def _improve_group(
    levels: Tensor,
    fitted: Tensor,
    pull: Tensor,
    kept: Tensor,
    scale: Tensor,
    square: Tensor,
    grid: Grid,
) -> Tensor:
    """One turn for each column of a group, then for its scales, which are returned; levels, weights
    and pull change in place."""
    per_scale, per_column = inverse(scale), inverse(square.diagonal())
    for j in range(len(levels)):
        best = torch.addcmul(fitted[j], pull[j], per_column[j])
        level = grid.nearest(best.mul_(per_scale)).mul_(kept[j])
        new = level * scale
        pull.addr_(square[j], new - fitted[j], alpha=-1)
        levels[j], fitted[j] = level, new
    image = square @ levels
    slope, curvature = (levels * pull).sum(0), (levels * image).sum(0)
    wanted = round_scale(scale + slope * inverse(curvature))
    change = wanted - scale
    falls = (change * (2 * slope - change * curvature) > 0) & (wanted > 0)
    change = torch.where(falls, change, 0.0)
    fitted.addcmul_(levels, change)
    pull.addcmul_(image, change, value=-1)
    return scale + change


def _dense(found: Found, keep: Tensor) -> Tensor:
    levels, scales = found
    return levels * spread(scales, levels.shape[1]) * keep
