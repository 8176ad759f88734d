"""A client's part of a proximal step: local steps on `f_i + ||. - x||^2 / (2 gamma)`.

Cohort Squeeze (thesis chapter 5): LocalGD inside the cohort, or Adam for networks, whose state is
new in every local round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.problems.problem import Problem
from symprune.fed.randomness import Stream


@dataclass(frozen=True)
class Worker:
    """How a client works between two local rounds."""

    gamma: float
    step: float
    steps: int
    batch: int | None = None
    adam: bool = False


def train_near(problem: Problem, x: Tensor, z: Tensor, how: Worker, stream: Stream) -> Tensor:
    """Local steps from z with a pull to x. The hub makes the weights of the models sum to 1, so
    the pull is exact when those of the sampling do."""
    w, first, second = z, torch.zeros_like(z), torch.zeros_like(z)
    for number in range(1, how.steps + 1):
        rows = None if how.batch is None else problem.batch(stream, how.batch)
        g = problem.gradient(w, rows) + (w - x) / how.gamma
        if not how.adam:
            w = w - how.step * g
            continue
        first = 0.9 * first + 0.1 * g
        second = 0.999 * second + 0.001 * g.square()
        size = (second / (1 - 0.999**number)).sqrt() + 1e-8
        w = w - how.step * (first / (1 - 0.9**number)) / size
    return w
