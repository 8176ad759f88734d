"""Ditto and local training: a dense personal model per client that never leaves it.

Baselines of "Achieving Personalized Federated Learning with Sparse Local Models", section 6 and
appendix B.3. Ditto's personal models are pulled to a FedAvg model, local ones are on their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from symprune.fed.algorithms.baselines.fedavg_epochs import FedAvgEpochs
from symprune.fed.algorithms.shared.local_epochs import LocalEpochs
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Message, Received, State, Turn, check
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class Ditto(FedAvgEpochs):
    """FedAvg, and a personal model v_i for f_i(v) + lam/2 ||v - x||^2 that stays at its client."""

    name = "ditto"
    paper = "Li et al.: Ditto, fair and robust federated learning through personalization"
    epochs: int = 2
    personal_epochs: int = 3
    lam: float = 0.5

    def prepare(self, constants: Constants) -> Algorithm:
        check(self.lam >= 0, f"ditto: lam = {self.lam} must not be negative.")
        check(self.personal_epochs >= 0, "ditto: personal_epochs must not be negative.")
        return super().prepare(constants)

    def client_init(self, problem: Problem, turn: Turn) -> State:
        return {"v": problem.initial(turn.seed).expand(problem.clients, -1).contiguous()}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        x = received["x"]
        stream, epochs = turn.stream("personal"), self.personal_epochs
        v = self.train_locally(
            problem, client["v"], turn, stream, epochs=epochs, pull=(self.lam, x)
        )
        return {"v": v}, self.reply(self.update(x, problem, turn), turn)

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        return client["v"]


@register
@dataclass(frozen=True)
class Local(LocalEpochs):
    """Every client trains alone whenever it is sampled; nothing but the wake-up call travels."""

    name = "local"
    paper = "Local training without communication"
    sends = "nothing"
    averages = False

    def client_init(self, problem: Problem, turn: Turn) -> State:
        return {"v": problem.initial(turn.seed).expand(problem.clients, -1).contiguous()}

    def broadcast(self, server: State, turn: Turn) -> Message:
        return {}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        return {"v": self.train_locally(problem, client["v"], turn, turn.stream("batch"))}, {}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        return server

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        return client["v"]
