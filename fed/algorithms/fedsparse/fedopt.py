"""Generalised FedAvg: local epochs of SGD, and a server optimiser on the clients' differences.

An Expectation-Maximization Perspective on Federated Learning, section 2: hard EM with a Gaussian
prior. A plain server step is FedAvg, `pull > 0` is FedProx, Adam at the server is FedAdam; it is
the dense baseline of FedSparse.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from symprune.fed.algorithms.fedsparse.em import EMMethod, remember, server_rate
from symprune.fed.algorithms.fedsparse.server_optimizers import ascend, moments
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Message, Received, Sent, State, Turn, given
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class FedOpt(EMMethod):
    """FedAvg whose server takes the sum of the clients' differences as a gradient."""

    name = "fedopt"
    paper = "An EM Perspective on Federated Learning, section 2; Reddi et al.: Adaptive FedOpt"
    sends = "up: local model; down: model"
    replies: ClassVar[tuple[str, ...]] = ("w",)
    averages: ClassVar[bool] = True
    server_optimizer: str = "adam"
    server_lr: float | None = None  # None: Adam 1e-3, plain steps 1/(cohort size)

    def prepare(self, constants: Constants) -> Algorithm:
        cohort = self.cohort_size or constants.clients
        rate = server_rate(self.server_optimizer, self.server_lr, cohort)
        return replace(super().prepare(constants), server_lr=rate)  # type: ignore[call-arg]

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {"x": x0, **moments(x0, "x")}

    def penalty(self, w: Tensor) -> Tensor | float:
        """Gradient of a penalty on the local weights."""
        return 0.0

    def compress_reply(self, w: Tensor) -> Tensor | Sent:
        return w

    def train_locally(
        self,
        x: Tensor,
        problem: Problem,
        turn: Turn,
        mask: Tensor | None = None,
        correction: Tensor | float = 0.0,
    ) -> Tensor:
        """Local epochs from x, only where the mask is True; a correction is added to every
        gradient."""
        w, stream = x, turn.stream("batch")
        for _ in range(self.epochs):
            for rows, active in problem.epoch(stream, self.batch):
                g = problem.gradient(w, rows) + self.pull * (w - x) + self.penalty(w)
                g = g + correction
                step = self.lr * (g if mask is None else g * mask)
                w = torch.where(active.unsqueeze(1), w - step, w)
        return w

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        sent = self.compress_reply(self.train_locally(received["x"], problem, turn))
        kept = sent.tensor if isinstance(sent, Sent) else sent
        assert isinstance(kept, Tensor)
        return remember(client, kept), {"w": sent}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        return self.step_server(server, (replies["w"] - server["x"]).sum(0))

    def step_server(self, server: State, along: Tensor) -> State:
        """The server's state after its optimiser went along this direction."""
        rate = given(self.server_lr)
        x, moved = ascend(self.server_optimizer, server["x"], along, server, "x", rate)
        return {"x": x, **moved}
