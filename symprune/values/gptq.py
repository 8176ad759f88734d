"""GPTQ (Frantar et al., 2022) under a mask: SparseGPT's column loop with weights on a grid.

Column by column a weight is rounded, or removed, and its error is spread over the columns to its
right through the inverse Hessian. Without a mask it is GPTQ. A group's scales are chosen when its
first column is reached, for the weights as they are then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.scores import inverse
from symprune.update.damped_gram import ROWS_AT_ONCE_ELSEWHERE, DampedGram
from symprune.values.grid import Grid, groups_of, per_scale
from symprune.values.scales import choose_scales

ROWS_AT_ONCE = 1024  # on a CPU: what a group of them takes stays in the cache

Found = tuple[Tensor, Tensor]
"""Levels `[out, in]` and scales `[out, groups]`, both in fp32."""


@dataclass(frozen=True)
class Spreading:
    """How errors are spread: the upper Cholesky factor of H^-1, the same for all rows.

    failed: not 0 where H is too close to singular for fp32.
    """

    upper: Tensor
    failed: Tensor

    @classmethod
    def along(cls, gram: DampedGram) -> Spreading:
        hessian, diagonal = gram.gram.clone(), gram.diagonal
        hessian.diagonal().copy_(diagonal.masked_fill(diagonal <= 0, 1))
        factor, failed = torch.linalg.cholesky_ex(hessian)
        upper, not_inverted = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        return cls(upper, failed + not_inverted)


def gptq(weight: Tensor, keep: Tensor, spreading: Spreading, grid: Grid) -> Found:
    """The weights on the grid; what `keep` does not keep is removed on the way."""
    upper = spreading.upper
    levels, scales = row_by_row(weight, lambda rows: _gptq(weight[rows], keep[rows], upper, grid))
    return levels, scales


def _gptq(weight: Tensor, keep: Tensor, upper: Tensor, grid: Grid) -> Found:
    waiting, kept = weight.T.float().contiguous(), keep.T.float()  # here a column is a row
    levels, scales = torch.empty_like(waiting), []
    for columns in groups_of(len(waiting)):
        local, among, there = waiting[columns], upper[columns, columns], kept[columns]
        importance = inverse(among.diagonal().square())
        scale = choose_scales(local.T, keep[:, columns], grid, importance).squeeze(1)
        inverse_scale, per_column = per_scale(scale), inverse(among.diagonal())
        errors = torch.empty_like(local)
        for j in range(len(local)):
            level = grid.nearest(local[j] * inverse_scale)
            errors[j] = (local[j] - level * scale * there[j]) * per_column[j]
            local[j + 1 :].addr_(among[j, j + 1 :], errors[j], alpha=-1)
            levels[columns.start + j] = level
        waiting[columns.stop :].addmm_(upper[columns, columns.stop :].T, errors, alpha=-1)
        scales.append(scale)
    return levels.T, torch.stack(scales, 1)


def row_by_row(weight: Tensor, solve: Callable[[slice], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """What `solve` finds for some rows of a matrix, for all of them."""
    at_once = ROWS_AT_ONCE if weight.device.type == "cpu" else ROWS_AT_ONCE_ELSEWHERE
    parts = [solve(slice(start, start + at_once)) for start in range(0, len(weight), at_once)]
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))
