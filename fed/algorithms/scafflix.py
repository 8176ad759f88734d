"""Scafflix and i-Scaffnew, and FLIX by gradient descent (thesis chapter 3, appendix B).

FLIX: client i deploys `xt_i = alpha_i x + (1 - alpha_i) c_i`, with c_i its own optimum. Scafflix
solves `min_x mean f_i(xt_i)` with local steps, control variates and a step size per client. The
updates keep `sum_i alpha_i h_i` constant, so that sum must start at zero; the thesis asks for
`sum_i h_i = 0`, which for unequal alpha_i leads to a wrong point. i-Scaffnew is alpha = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.local import local_gradient, local_optimum, local_steps
from symprune.fed.problem import Constants, Problem
from symprune.fed.protocol import (
    Algorithm,
    Message,
    Received,
    State,
    Turn,
    check,
    given,
    per_client,
    register,
    sample,
)

PerClient = float | tuple[float, ...]


@dataclass(frozen=True)
class Flix(Algorithm):
    """What FLIX methods share: alpha, the clients' optima and the personalised point."""

    alpha: PerClient = 0.5
    tolerance: float = 1e-6
    max_local_steps: int = 10_000

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
        alphas = self.alphas * (1 if isinstance(self.alpha, tuple) else constants.clients)
        if self.eta is not None:
            return self
        check(constants.known, f"{self.name} needs eta: the problem's smoothness is unknown.")
        L = sum(a * a * v for a, v in zip(alphas, constants.L, strict=True)) / len(alphas)
        return replace(self, eta=1 / L)

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        g = problem.gradient(self.point(client, received["x"], turn))
        return client, {"g": per_client(self.alpha, turn, g) * g}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        return {"x": server["x"] - self.eta * replies["g"].mean(0)}


@register
@dataclass(frozen=True)
class Scafflix(Flix):
    """FLIX with local steps, control variates and individual step sizes; cohorts optional."""

    name = "scafflix"
    paper = "Scafflix (thesis chapter 3), Algorithm 2, Theorem 3.3.4"
    sends = "up: (alpha_i^2/gamma_i) local model; down: weighted mean"
    replies = ("xhat",)
    gamma: PerClient | None = None
    p: float | None = None
    batch: int | None = None
    cohort_size: int | None = None
    individual: bool = True
    random_steps: bool = True

    def prepare(self, constants: Constants) -> Algorithm:
        """gamma_i = 1/L_i (1/max L when not individual), p = 1/sqrt(kappa_max)."""
        check(len(self.alphas) in (1, constants.clients), f"{self.name}: one alpha per client.")
        gamma, p = self.gamma, self.p
        if gamma is None:
            check(constants.known, f"{self.name} needs gamma: smoothness is unknown.")
            L = constants.L if self.individual else (constants.L_max,) * constants.clients
            gamma = tuple(1 / v for v in L)
        if isinstance(gamma, float | int):
            gamma = (float(gamma),) * constants.clients
        check(min(gamma) > 0, f"{self.name}: gamma must be positive.")
        if p is None:
            convex = constants.known and constants.mu_min > 0
            check(convex, f"{self.name} needs p: the problem is not strongly convex.")
            pairs = zip(gamma, constants.mu, strict=True)
            p = min(1.0, math.sqrt(min(g * mu for g, mu in pairs)))
        check(0 < p <= 1, f"{self.name}: p = {p} is outside (0, 1].")
        return replace(self, gamma=gamma, p=p)

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {"x": x0, "pending": torch.zeros(turn.n, dtype=torch.bool)}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        zero = torch.zeros(problem.clients, problem.dimension, dtype=problem.dtype)
        pending = torch.zeros(problem.clients, dtype=torch.bool)
        own = super().client_init(problem, turn)
        return {**own, "h": zero, "xhat": zero, "pending": pending}

    def cohort(self, server: State, turn: Turn) -> Tensor:
        return sample(self.cohort_size, turn)

    def listeners(self, server: State, turn: Turn) -> Tensor:
        return server["pending"].nonzero().squeeze(1)

    def scales(self, turn: Turn, like: Tensor) -> tuple[Tensor, Tensor]:
        assert self.gamma is not None
        return per_client(self.alpha, turn, like), per_client(self.gamma, turn, like)

    def listen(self, client: State, received: Received, turn: Turn) -> State:
        """`h_i <- h_i + (p alpha_i / gamma_i)(xbar - xhat_i)` for those who took part."""
        alpha, gamma = self.scales(turn, client["h"])
        step = (given(self.p) * alpha / gamma) * (received["x"] - client["xhat"])
        h = torch.where(client["pending"].unsqueeze(1), client["h"] + step, client["h"])
        return {**client, "h": h, "pending": torch.zeros_like(client["pending"])}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        x, stream = received["x"], turn.stream("batch")
        alpha, gamma = self.scales(turn, x)
        for _ in range(local_steps(given(self.p), turn, self.random_steps)):
            g = local_gradient(problem, self.point(client, x, turn), self.batch, stream)
            x = x - (gamma / alpha) * (g - client["h"])
        state = {**client, "xhat": x, "pending": torch.ones_like(client["pending"])}
        return state, {"xhat": (alpha.square() / gamma) * x}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """`xbar = sum_i (alpha_i^2/gamma_i) xhat_i / sum_i (alpha_i^2/gamma_i)` over the cohort."""
        alpha, gamma = self.scales(turn, server["x"])
        pending = torch.zeros_like(server["pending"])
        pending[turn.clients] = True
        x = replies["xhat"].sum(0) / (alpha.square() / gamma).sum()
        return {"x": x, "pending": pending}

    def memory(self, server: State, turn: Turn) -> State:
        zero = torch.zeros(turn.n, *server["x"].shape, dtype=server["x"].dtype)
        return {"h": zero, "xhat": zero, "pending": torch.zeros(turn.n, dtype=torch.bool)}

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        alpha, gamma = self.scales(turn, memory["h"])
        xhat = replies["xhat"] / (alpha.square() / gamma)
        return {**memory, "xhat": xhat, "pending": torch.ones_like(memory["pending"])}

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """`||sum alpha_i h_i||`, zero up to rounding."""
        n = len(client["h"])
        turn = Turn(0, 0, n, torch.arange(n))
        h = self.listen(client, {"x": server["x"].expand(n, -1)}, turn)["h"]
        return {"alpha_h_sum": float((per_client(self.alpha, turn, h) * h).sum(0).norm())}


@register
@dataclass(frozen=True)
class IScaffnew(Scafflix):
    """Scafflix without personalisation: Scaffnew with a step size per client."""

    name = "i-scaffnew"
    paper = "i-Scaffnew (thesis chapter 3, appendix B)"
    sends = "up: local model / gamma_i; down: weighted mean"
    alpha: PerClient = 1.0

    def prepare(self, constants: Constants) -> Algorithm:
        check(not self.personalises, f"{self.name} has alpha = 1; use scafflix for {self.alpha}.")
        return super().prepare(constants)

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        return None
