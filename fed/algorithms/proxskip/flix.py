"""FLIX by gradient descent, and what the FLIX methods share (thesis chapter 3).

Client i deploys `xt_i = alpha_i x + (1 - alpha_i) c_i`, a mixture of the shared x and its own
optimum c_i; all solve `min_x mean f_i(xt_i)`. Scafflix solves the same with local steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.algorithms.shared.local_steps import local_optimum
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Message, Received, State, Turn, check, per_client
from symprune.fed.registry import register

PerClient = float | tuple[float, ...]


@dataclass(frozen=True)
class Flix(Algorithm):
    """What FLIX methods share: alpha, the clients' optima and the personalised point."""

    alpha: PerClient = 0.5
    tolerance: float = 1e-6
    max_local_steps: int = 10_000

    def prepare(self, constants: Constants) -> Algorithm:
        given, n = len(self.alphas), constants.clients
        check(given in (1, n), f"{self.name}: {given} values of alpha for {n} clients.")
        return self

    @property
    def alphas(self) -> tuple[float, ...]:
        values = self.alpha if isinstance(self.alpha, tuple) else (self.alpha,)
        valid = all(0 < a <= 1 for a in values)
        check(valid, f"{self.name}: alpha = {self.alpha} is outside (0, 1].")
        return values

    @property
    def personalises(self) -> bool:
        return any(a < 1 for a in self.alphas)

    def client_init(self, problem: Problem, turn: Turn) -> State:
        """Each client finds its own optimum, once and without communication."""
        if not self.personalises:
            return {}
        return {"centre": local_optimum(problem, self.tolerance, self.max_local_steps)}

    def point(self, client: State, x: Tensor, turn: Turn) -> Tensor:
        """`alpha_i x + (1 - alpha_i) c_i`."""
        if not self.personalises:
            return x
        alpha = per_client(self.alpha, turn, x)
        return alpha * x + (1 - alpha) * client["centre"]

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        n = problem.clients
        turn = Turn(0, 0, n, torch.arange(n))
        return self.point(client, server["x"].expand(n, -1), turn)


@register
@dataclass(frozen=True)
class FlixGD(Flix):
    """FLIX by gradient descent: one exchange per step."""

    name = "flix-gd"
    paper = "FLIX (thesis chapter 3), solved by distributed gradient descent"
    sends = "up: alpha_i grad f_i(xt_i); down: x"
    replies = ("g",)
    eta: float | None = None

    def prepare(self, constants: Constants) -> Algorithm:
        """eta = 1 / mean(alpha_i^2 L_i), the smoothness of the FLIX objective."""
        super().prepare(constants)
        if self.eta is not None:
            return self
        check(constants.known, f"{self.name} needs eta: the problem's smoothness is unknown.")
        alphas = self.alphas * (constants.clients // len(self.alphas))
        L = sum(a * a * v for a, v in zip(alphas, constants.L, strict=True)) / len(alphas)
        return replace(self, eta=1 / L)

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        g = problem.gradient(self.point(client, received["x"], turn))
        return client, {"g": per_client(self.alpha, turn, g) * g}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        return {"x": server["x"] - self.eta * replies["g"].mean(0)}
