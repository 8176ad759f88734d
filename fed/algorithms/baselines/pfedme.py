"""pFedMe: personal models around a shared one, by the Moreau envelopes of the clients' losses.

T. Dinh et al., "Personalized federated learning with Moreau envelopes", Algorithm 1: the shared w
minimises the mean of `F_i(w) = min_theta f_i(theta) + lam/2 ||theta - w||^2`, whose gradient is
`lam (w - theta_i(w))`; the minimiser theta_i is client i's own model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Message, Received, SampledClients, State, Turn, check
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class PFedMe(SampledClients):
    """Local rounds on the clients' Moreau envelopes; the proximal points are personal models."""

    name = "pfedme"
    paper = "T. Dinh et al.: Personalized federated learning with Moreau envelopes, Algorithm 1"
    sends = "up: local shared model; down: shared model"
    replies = ("w",)
    averages = True
    lam: float = 15.0  # pull of a personal model to the shared one
    eta: float = 0.005  # step on the envelope
    beta: float = 1.0  # how far the server goes towards the mean
    local_rounds: int = 20  # R
    inner_steps: int = 5  # of gradient descent towards the proximal point
    lr: float = 0.05  # their step
    batch: int | None = 20  # rows per local round; None: all

    def prepare(self, constants: Constants) -> Algorithm:
        for option in ("lam", "eta", "beta", "local_rounds", "inner_steps", "lr"):
            value = getattr(self, option)
            check(value > 0, f"pfedme: {option} = {value} must be positive.")
        return self

    def client_init(self, problem: Problem, turn: Turn) -> State:
        return {"theta": problem.initial(turn.seed).expand(problem.clients, -1).contiguous()}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        w, theta, stream = received["x"], client["theta"], turn.stream("batch")
        for _ in range(self.local_rounds):
            rows = problem.step_rows(stream, self.batch)
            theta = w
            for _ in range(self.inner_steps):
                g = problem.gradient(theta, rows) + self.lam * (theta - w)
                theta = theta - self.lr * g
            w = w - self.eta * self.lam * (w - theta)
        return {"theta": theta}, {"w": w}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        return {"x": server["x"] + self.beta * (replies["w"].mean(0) - server["x"])}

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        return client["theta"]
