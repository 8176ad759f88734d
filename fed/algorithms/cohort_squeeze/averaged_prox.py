"""Averages of the clients' own proximal points: FedProx-SPPM-AS and FedAvg-SPPM-AS.

Cohort Squeeze (thesis appendix D.2.4), Algorithms 12 and 13, the baselines of SPPM-AS. A mean of
proximal points is not the proximal point of the mean, so both keep a bias: the first one of the
order of gamma, the second of its inner step alpha.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.algorithms.cohort_squeeze.cohorts import (
    AnchoredClients,
    CohortMethod,
    average_models,
)
from symprune.fed.algorithms.cohort_squeeze.sampling import Sampling
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Message, Received, State, Turn, check
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class FedProxSPPM(CohortMethod):
    """K times per cohort: the mean of the clients' proximal points prox_{gamma f_i}(z)."""

    name = "fedprox-sppm"
    paper = "Cohort Squeeze (thesis appendix D.2.4), Algorithm 12: FedProx-SPPM-AS"
    sends = "up: proximal point; down: point"
    replies = ("w",)
    tolerance: float = 1e-6  # on the gradient norm of a client's proximal problem
    max_steps: int = 500  # of the client's accelerated gradient method

    def prepare(self, constants: Constants) -> Algorithm:
        ready = self.complete(constants)
        known = ready.L is not None and ready.mu is not None
        check(known, f"{self.name} needs a model with known smoothness, such as logistic.")
        return ready

    def work(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        w = self.local_prox(received["z"], received["z"], self.gamma, problem, turn)
        return client, {"w": w}

    def solve(
        self, hub: State, x: Tensor, replies: Received, sampling: Sampling, cohort: Tensor
    ) -> State:
        return average_models(hub, replies["w"], torch.ones(len(cohort), dtype=torch.float64))

    def local_prox(
        self, anchor: Tensor, start: Tensor, gamma: float, problem: Problem, turn: Turn
    ) -> Tensor:
        """`argmin_w f_i(w) + ||w - anchor||^2 / (2 gamma)` of every client by Nesterov's method; a
        client that is done stands still, so the others do not change its result."""
        L, mu = (
            torch.tensor(v, dtype=torch.float64)[turn.clients].unsqueeze(1) + 1 / gamma
            for v in (self.L, self.mu)
        )
        root = (L / mu).sqrt()
        step, momentum = (1 / L).to(start.dtype), ((root - 1) / (root + 1)).to(start.dtype)
        w, y = start, start
        for _ in range(self.max_steps):
            g = problem.gradient(y) + (y - anchor) / gamma
            going = g.norm(dim=1, keepdim=True) > self.tolerance
            if not bool(going.any()):
                break
            there = y - step * g
            y = torch.where(going, there + momentum * (there - w), y)
            w = torch.where(going, there, w)
        return y


@register
@dataclass(frozen=True)
class FedAvgSPPM(AnchoredClients, FedProxSPPM):
    """K times per cohort: the mean of prox_{alpha h_i}(z), h_i = f_i + ||. - x||^2 / (2 gamma)."""

    name = "fedavg-sppm"
    paper = "Cohort Squeeze (thesis appendix D.2.4), Algorithm 13: FedAvg-SPPM-AS"
    alpha: float = 0.1  # inner step; the result tends to the proximal point of the mean as it falls

    def prepare(self, constants: Constants) -> Algorithm:
        check(self.alpha > 0, f"fedavg-sppm: alpha = {self.alpha} must be positive.")
        return super().prepare(constants)

    def work(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        """`prox_{alpha h_i}(z) = prox_{beta f_i}(beta (x/gamma + z/alpha))` with
        `beta = alpha gamma / (alpha + gamma)`; the thesis prints both anchors as z, which is right
        in the first local round only."""
        x, z = self.anchor(client, received), received["z"]
        beta = 1 / (1 / self.alpha + 1 / self.gamma)
        anchor = beta * (x / self.gamma + z / self.alpha)
        return {"x": x}, {"w": self.local_prox(anchor, z, beta, problem, turn)}
