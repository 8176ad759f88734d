"""SCAFFOLD: epochs of SGD whose drift to a client's own optimum is corrected.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", with option
II for the variates, as the EM paper on FedSparse compares with it (appendix E): the server takes
the clients' differences as a gradient. With a plain server step it is the original. Client s keeps
`c_s`, the mean of its own gradients in its last round, the server `c = mean c_s`; every local step
goes along `g - c_s + c`, so clients with different data do not drift to their own optima.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.algorithms.fedsparse.em import EMMethod, remember
from symprune.fed.algorithms.fedsparse.fedopt import FedOpt
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Message, Received, State, Turn
from symprune.fed.registry import register


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

    def update_variate(self, server: State, changes: Tensor, turn: Turn) -> Tensor:
        """The server's c: those who did not work count with a change of zero."""
        return server["c"] + changes.sum(0) / turn.n

    def memory(self, server: State, turn: Turn) -> State:
        return {"c": torch.zeros(turn.n, *server["x"].shape, dtype=server["x"].dtype)}

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        return {"c": memory["c"] + self.changes(received, replies)}

    def changes(self, received: Received, replies: Received) -> Tensor:
        """The changes of the clients' variates that were sent, `[C, d]`."""
        return replies["change"]


@register
@dataclass(frozen=True)
class Scaffold(ScaffoldVariates, FedOpt):
    """FedAvg with control variates: local steps along `g - c_s + c`."""

    name = "scaffold"
    paper = "Karimireddy et al.: SCAFFOLD; An EM Perspective on Federated Learning, appendix E"
    sends = "up: local model, change of its control variate; down: model, mean control variate"
    replies = ("w", "change")
    averages = False  # the server's c is the mean of the clients' c_s, exactly

    def broadcast(self, server: State, turn: Turn) -> Message:
        return {"x": server["x"], "c": server["c"]}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        x, c = received["x"], received["c"]
        w = self.train_locally(x, problem, turn, correction=c - client["c"])
        change = self.change(x, w, c, problem)
        return {**remember(client, w), "c": client["c"] + change}, {"w": w, "change": change}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        c = self.update_variate(server, replies["change"], turn)
        return {**super().server_step(server, replies, turn), "c": c}
