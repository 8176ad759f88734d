"""FedMedian: hard EM with a Laplace prior on the clients' models.

An Expectation-Maximization Perspective on Federated Learning, section 2 and appendix J. The prior
decides both the pull on the clients and the server's closed step: where a Gaussian gives FedProx
and the mean (`fedopt`), this one gives a proximal step of the l1 norm and the median.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.algorithms.fedsparse.em import EMMethod, remember
from symprune.fed.algorithms.shared.local_steps import soft_threshold
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Message, Received, State, Turn
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class FedMedian(EMMethod):
    """Laplace prior: clients leave most weights as they are, the server takes medians."""

    name = "fedmedian"
    paper = "Louizos et al.: An EM Perspective on Federated Learning, appendix J (Laplace prior)"
    sends = "up: changed weights only; down: model"
    replies = ("change",)
    pull: float = 0.01  # lambda of ||w - x||_1

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        """SGD on the likelihood, then the proximal step of the prior: `w - x` is soft-thresholded
        by lr * lambda, so that many weights come back exactly unchanged."""
        x, stream = received["x"], turn.stream("batch")
        away = torch.zeros_like(x)
        for _ in range(self.epochs):
            for rows, active in problem.epoch(stream, self.batch):
                moved = away - self.lr * problem.gradient(x + away, rows)
                shrunk = soft_threshold(moved, self.lr * self.pull)
                away = torch.where(active.unsqueeze(1), shrunk, away)
        return remember(client, x + away), {"change": away}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        return {"x": server["x"] + median(replies["change"])}


def median(rows: Tensor) -> Tensor:
    """Coordinate-wise over the rows; of an even number the mean of the two middle values."""
    ordered, n = rows.sort(dim=0).values, len(rows)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
