"""Gradients to which no record contributes much: per-record clipping for private training.

LDP-FedP3 (thesis chapter 4, Algorithm 11). Records are drawn independently of each other, as the
accountant of `privacy.py` supposes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from symprune.fed.problems.problem import Problem, Rows
from symprune.fed.randomness import Stream


def clipped_gradient(
    problem: Problem, w: Tensor, batch: int, clip: float, stream: Stream
) -> Tensor:
    """`(1/b) sum_j g_j min(1, C/||g_j||)` over records that are drawn with probability b/m each; b
    is the expected number, not the drawn one, so a record changes the result by C/b at most."""
    rows, out = problem.rows, []
    chance = (batch / problem.counts).clamp_max(1).unsqueeze(1)
    drawn = (stream.uniform(rows.y.shape[1]) < chance) & (rows.weights != 0)
    for i, use in enumerate(drawn):
        out.append(record_gradients(problem, w[i], rows[i][use], clip).sum(0) / batch)
    return torch.stack(out)


def record_gradients(problem: Problem, w: Tensor, rows: Rows, clip: float) -> Tensor:
    """The gradient of every record of one client `[m, d]`, none longer than `clip`."""
    m = len(rows.y)
    if m == 0:
        return w.new_zeros(0, len(w))
    one = torch.ones(m, 1, dtype=w.dtype)
    each = w.expand(m, -1).contiguous()
    g = problem.loss.gradient(each, rows.x.unsqueeze(1), rows.y.unsqueeze(1), one)
    return g * (clip / g.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1)


def penalty(problem: Problem, w: Tensor) -> Tensor:
    """The gradient of the regulariser alone, which no record enters and no noise need hide."""
    nothing = replace(problem.rows[:, :1], weights=torch.zeros_like(problem.rows.weights[:, :1]))
    return problem.gradient(w, nothing)
