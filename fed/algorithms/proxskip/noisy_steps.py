"""Step sizes for stochastic gradients (Scafflix: thesis chapter 3, section 3.2, Corollary 3.2.5).

With batches Scafflix ends in a neighbourhood whose size grows with the step. The corollary turns
that around: for the accuracy that is wanted it gives the largest steps that reach it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.fed.problems.problem import Problem, Rows
from symprune.fed.protocol import check


def steps_for_accuracy(
    problem: Problem, points: Tensor, batch: int, accuracy: float
) -> tuple[float, ...]:
    """`gamma_i = min(1/A_i, accuracy mu_min / (2 C_i))`, the `gamma` of Scafflix for batches of
    this size, with which `E Psi <= accuracy` in the end.

    points: `[C, d]`, where the noise is measured. The corollary means the personalised optima,
    which nobody knows beforehand; the clients' own optima are an estimate of them."""
    constants = problem.constants()
    usable = constants.known and constants.mu_min > 0
    check(usable, "Steps for an accuracy need a problem known to be smooth and strongly convex.")
    check(batch > 0, f"batch = {batch} must be positive.")
    check(accuracy > 0, f"accuracy = {accuracy} must be positive.")
    growth, noise = sampling_noise(problem, points, batch)
    return tuple(torch.minimum(1 / growth, accuracy * constants.mu_min / (2 * noise)).tolist())


def sampling_noise(problem: Problem, points: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """A_i and C_i, `[C]` each, of `E||g - grad f_i(x_i)||^2 <= 2 A_i D_i + C_i` for gradients of
    `batch` rows drawn uniformly with replacement, x_i the points.

    For one row A_i = 2 max_j L_ij and C_i is twice the variance, as in the thesis; the mean of b
    rows has `A_i = 2 (max_j L_ij / b + (1 - 1/b) L_i)` and a b-th of the variance."""
    mean, counts = problem.gradient(points), problem.counts
    total = problem.rows.weights.sum(1, keepdim=True)
    variance = torch.zeros(problem.clients, dtype=torch.float64)
    steepest = torch.zeros_like(variance)
    extra = problem.l2 + 2 * problem.nonconvex
    for j in range(int(counts.max())):
        row = Rows(problem.rows.x[:, j : j + 1], problem.rows.y[:, j : j + 1], total)
        there = j < counts
        away = (problem.gradient(points, row) - mean).double().square().sum(1)
        variance += torch.where(there, away / counts, 0.0)
        L = problem.loss.smoothness(row.x, total) + extra  # type: ignore[attr-defined]
        steepest = torch.where(there, torch.maximum(steepest, L), steepest)
    L = torch.tensor(problem.constants().L, dtype=torch.float64)
    return 2 * (steepest / batch + (1 - 1 / batch) * L), 2 * variance / batch
