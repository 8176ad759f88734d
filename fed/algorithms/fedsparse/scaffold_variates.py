"""SCAFFOLD's control variates: what a client knows of the direction the others would take.

Karimireddy et al., "SCAFFOLD", with option II for the variates. Client s keeps `c_s`, the mean of
its own gradients in its last round, the server `c = mean c_s`; every local step goes along
`g - c_s + c`, so clients with different data do not drift to their own optima.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.algorithms.fedsparse.em import EMMethod
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Received, State, Turn


@dataclass(frozen=True)
class ScaffoldVariates(EMMethod):
    """State `c` at the server and at every client, zero at first."""

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {**super().server_init(x0, turn), "c": torch.zeros_like(x0)}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        zero = torch.zeros(problem.clients, problem.dimension, dtype=problem.dtype)
        return {**super().client_init(problem, turn), "c": zero}

    def change(self, x: Tensor, w: Tensor, c: Tensor, problem: Problem) -> Tensor:
        """What is added to c_s after the k local steps from x to w: `(x - w)/(k lr) - c`."""
        batches = (problem.counts + self.batch - 1) // self.batch
        steps = (self.epochs * batches).unsqueeze(1).to(x.dtype)
        return (x - w) / (steps * self.lr) - c

    def moved(self, server: State, changes: Tensor, turn: Turn) -> Tensor:
        """The server's c: those who did not work count with a change of zero."""
        return server["c"] + changes.sum(0) / turn.n

    def memory(self, server: State, turn: Turn) -> State:
        return {"c": torch.zeros(turn.n, *server["x"].shape, dtype=server["x"].dtype)}

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        return {"c": memory["c"] + self.changes(received, replies)}

    def changes(self, received: Received, replies: Received) -> Tensor:
        """The changes of the clients' variates that were sent, `[C, d]`."""
        return replies["change"]
