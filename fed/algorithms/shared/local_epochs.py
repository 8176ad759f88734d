"""Local training as deep-learning papers do it: some epochs of minibatch SGD whose step size decays
from round to round. Weight decay is the problem's own l2 term.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, SampledClients, Turn, check
from symprune.fed.randomness import Stream


@dataclass(frozen=True)
class LocalEpochs(SampledClients):
    """Base of the algorithms whose clients train for `epochs` passes over their rows; the defaults
    are FedSpa's (section 6)."""

    epochs: int = 5
    batch: int = 128
    lr: float = 0.1
    lr_decay: float = 0.998

    def prepare(self, constants: Constants) -> Algorithm:
        check(self.epochs >= 0, f"{self.name}: epochs = {self.epochs} must not be negative.")
        check(self.batch > 0, f"{self.name}: batch = {self.batch} must be positive.")
        check(self.lr >= 0, f"{self.name}: lr = {self.lr} must not be negative.")
        check(self.lr_decay > 0, f"{self.name}: lr_decay = {self.lr_decay} must be positive.")
        return self

    def step_size(self, turn: Turn) -> float:
        return self.lr * self.lr_decay**turn.number

    def train_locally(
        self,
        problem: Problem,
        w: Tensor,
        turn: Turn,
        stream: Stream,
        *,
        epochs: int | None = None,
        mask: Tensor | None = None,
        pull: tuple[float, Tensor] | None = None,
    ) -> Tensor:
        """`train` with this algorithm's epochs, batches and step size of the round."""
        epochs = self.epochs if epochs is None else epochs
        step = self.step_size(turn)
        return train(problem, w, stream, epochs, self.batch, step, mask=mask, pull=pull)


def train(
    problem: Problem,
    w: Tensor,
    stream: Stream,
    epochs: int,
    batch: int,
    step_size: float,
    *,
    mask: Tensor | None = None,
    pull: tuple[float, Tensor] | None = None,
) -> Tensor:
    """`epochs` of SGD from `w [C, d]`. With `mask`, only where it is True; with `pull = (lam, x)`,
    on `f_i(w) + lam/2 ||w - x||^2`. A client whose rows are used up waits for the others."""
    for _ in range(epochs):
        for rows, active in problem.epoch(stream, batch):
            g = problem.gradient(w, rows)
            if pull is not None:
                g = g + pull[0] * (w - pull[1])
            step = step_size * (g if mask is None else g * mask)
            w = torch.where(active.unsqueeze(1), w - step, w)
    return w
