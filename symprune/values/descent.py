"""Coordinate descent on a grid: codes and scales that lower a layer's error, one after the other.

A row's error is (w - q)^T H (w - q), with w the dense weights, q those on the grid and H = G + R
(`DampedGram`). With the pull p = H (w - q), weight j alone would best be q_j + p_j / H_jj; of its
levels the nearest to that is the best one, so no step raises the error. Group by group, its columns
take their turn in all rows at once, then each row's scale, whose best value given the levels l is
s + l^T p / l^T H l; one product tells the other groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.scores import inverse
from symprune.update.damped_gram import DampedGram
from symprune.values.gptq import Found, Spreading, gptq, row_by_row
from symprune.values.grid import Grid, groups_of, per_scale, spread
from symprune.values.scales import choose_scales, nearest_levels, round_scale


def find_start(weight: Tensor, fitted: Tensor, keep: Tensor, gram: DampedGram, grid: Grid) -> Found:
    """Of the fitted weights' nearest and what GPTQ makes of them, for each row the better one."""
    scales = choose_scales(fitted, keep, grid, gram.diagonal)
    near = nearest_levels(fitted, scales, grid), scales
    loop = gptq(fitted, keep, Spreading.along(gram), grid)
    errors = [gram.error(weight - weights_of(found, keep)) for found in (near, loop)]
    # Where the Hessian has no inverse, GPTQ's error is not a number, and not smaller.
    better = (errors[1] < errors[0]).unsqueeze(1)
    return torch.where(better, loop[0], near[0]), torch.where(better, loop[1], near[1])


def descend(
    weight: Tensor, keep: Tensor, gram: DampedGram, grid: Grid, start: Found, sweeps: int
) -> Found:
    """From a start, after some sweeps over all columns. No row's error rises."""

    def improve(rows: slice) -> Found:
        there = start[0][rows], start[1][rows]
        return descend_rows(weight[rows], keep[rows], gram, grid, there, sweeps)

    levels, scales = row_by_row(weight, improve)
    return levels, scales


def descend_rows(
    weight: Tensor, keep: Tensor, gram: DampedGram, grid: Grid, start: Found, sweeps: int
) -> Found:
    rows = Rows.begin(weight, keep, gram, start)
    for _ in range(sweeps):
        rows.sweep(gram, grid)
    found, before = rows.found, weights_of(start, keep)
    better = falls(weight, before, weights_of(found, keep), gram)
    return torch.where(better, found[0], start[0]), torch.where(better, found[1], start[1])


def falls(weight: Tensor, before: Tensor, after: Tensor, gram: DampedGram) -> Tensor:
    """Which rows err less after than before, as a column: an error falls by the change times the
    sum of the pulls before and after it. Both are made anew: in a pull that is kept up to date,
    roundings add up."""
    pulls = gram.pull(weight - before) + gram.pull(weight - after)
    return ((after - before) * pulls).sum(1, keepdim=True) > 0


def weights_of(found: Found, keep: Tensor) -> Tensor:
    levels, scales = found
    return levels * spread(scales, levels.shape[1]) * keep


@dataclass
class Rows:
    """Some rows on their way. Columns come first: `[in, out]`, scales `[groups, out]`; kept is 1
    where a weight stays, else 0."""

    levels: Tensor
    scales: Tensor
    fitted: Tensor
    pull: Tensor
    kept: Tensor

    @classmethod
    def begin(cls, weight: Tensor, keep: Tensor, gram: DampedGram, start: Found) -> Rows:
        fitted, kept = weights_of(start, keep), keep.T.float().contiguous()
        pull = gram.pull(weight - fitted).T.contiguous()
        return cls(start[0].T * kept, start[1].T.clone(), fitted.T.contiguous(), pull, kept)

    @property
    def found(self) -> Found:
        return self.levels.T, self.scales.T

    def sweep(self, gram: DampedGram, grid: Grid, price: Tensor | None = None) -> None:
        """One turn for each column and each scale. With a price (`[in, out]`) a weight stays if it
        lowers the error by more, whatever the mask was."""
        for number, columns in enumerate(groups_of(len(self.levels))):
            was = self.fitted[columns].clone()
            square = gram.square(columns)
            self._turn_levels(columns, self.scales[number], square, grid, price)
            self._turn_scales(columns, number, square)
            change = self.fitted[columns] - was
            for others in (slice(columns.start), slice(columns.stop, None)):
                self.pull[others].addmm_(gram.gram[others, columns], change, alpha=-1)

    def _turn_levels(
        self, columns: slice, scale: Tensor, square: Tensor, grid: Grid, price: Tensor | None
    ) -> None:
        levels, fitted, pull, kept = (
            each[columns] for each in (self.levels, self.fitted, self.pull, self.kept)
        )
        diagonal, inverse_scale = square.diagonal(), per_scale(scale)
        per_column = inverse(diagonal)
        for j in range(len(levels)):
            best = torch.addcmul(fitted[j], pull[j], per_column[j])
            level = grid.nearest(best * inverse_scale)
            if price is not None:
                kept[j] = gain(diagonal[j], best, level * scale) > price[columns.start + j]
            level.mul_(kept[j])
            new = level * scale
            pull.addr_(square[j], new - fitted[j], alpha=-1)
            levels[j], fitted[j] = level, new

    def _turn_scales(self, columns: slice, number: int, square: Tensor) -> None:
        levels, pull, scale = self.levels[columns], self.pull[columns], self.scales[number]
        image = square @ levels
        slope, curvature = (levels * pull).sum(0), (levels * image).sum(0)
        wanted = round_scale(scale + slope * inverse(curvature))
        change = wanted - scale
        falling = (change * (2 * slope - change * curvature) > 0) & (wanted * scale > 0)
        change = torch.where(falling, change, 0.0)
        self.fitted[columns].addcmul_(levels, change)
        pull.addcmul_(image, change, value=-1)
        scale += change


def gain(curvature: Tensor, best: Tensor, value: Tensor) -> Tensor:
    """By how much the error is lower with a weight at `value` than without it; `best` is where it
    would be lowest."""
    return curvature * value * (2 * best - value)
