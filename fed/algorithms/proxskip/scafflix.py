"""FLIX by (stochastic) gradient descent, and with local steps: Scafflix and i-Scaffnew (thesis
chapter 3, appendix B).

Client i deploys `xt_i = alpha_i x + (1 - alpha_i) c_i`, a mixture of the shared x and its own
optimum c_i; all solve `min_x mean f_i(xt_i)`. Where smoothness is known c_i is found to a
tolerance, else (networks) it is what a stated number of epochs of SGD gives. Scafflix does so with
control variates and a step size per client. Its updates keep `sum_i alpha_i h_i` constant, so that
sum must start at zero; the thesis asks for `sum_i h_i = 0`, which for unequal alpha_i leads to a
wrong point. i-Scaffnew is alpha = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.algorithms.shared.control_variates import ControlVariates, control_variates
from symprune.fed.algorithms.shared.local_epochs import train
from symprune.fed.algorithms.shared.local_steps import (
    local_gradient,
    local_optimum,
    local_steps,
    probability,
    step_sizes,
)
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import (
    Algorithm,
    Message,
    Received,
    SampledClients,
    State,
    Turn,
    check,
    given,
    per_client,
)
from symprune.fed.registry import register

PerClient = float | tuple[float, ...]


@dataclass(frozen=True)
class Flix(Algorithm):
    """What FLIX methods share: alpha, the clients' optima and the personalised point."""

    alpha: PerClient = 0.5
    tolerance: float = 1e-6
    max_local_steps: int = 10_000
    local_epochs: int = 50  # of SGD for a network's own optimum
    local_batch: int = 100
    local_lr: float = 0.1

    def prepare(self, constants: Constants) -> Algorithm:
        given, n = len(self.alphas), constants.clients
        check(given in (1, n), f"{self.name}: {given} values of alpha for {n} clients.")
        for option in ("local_epochs", "local_batch", "local_lr"):
            value = getattr(self, option)
            check(value > 0, f"{self.name}: {option} = {value} must be positive.")
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
        return {"centre": self.own_optimum(problem, turn)} if self.personalises else {}

    def own_optimum(self, problem: Problem, turn: Turn) -> Tensor:
        """To the tolerance where smoothness is known, else by epochs of SGD from the usual start
        (thesis, section 3.3.2)."""
        if problem.constants().known:
            return local_optimum(problem, self.tolerance, self.max_local_steps)
        start, stream = problem.initial(turn.seed), turn.stream("own optimum")
        start = start.expand(problem.clients, -1)
        return train(problem, start, stream, self.local_epochs, self.local_batch, self.local_lr)

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
class FlixGD(Flix, SampledClients):
    """FLIX by gradient descent: one exchange per step."""

    name = "flix-gd"
    paper = "FLIX (thesis chapter 3), solved by distributed gradient descent"
    sends = "up: alpha_i grad f_i(xt_i); down: x"
    replies = ("g",)
    averages = True
    eta: float | None = None
    batch: int | None = None

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
        point, stream = self.point(client, received["x"], turn), turn.stream("batch")
        g = local_gradient(problem, point, self.batch, stream)
        return client, {"g": per_client(self.alpha, turn, g) * g}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        return {"x": server["x"] - self.eta * replies["g"].mean(0)}


@register
@dataclass(frozen=True)
class FlixSGD(FlixGD):
    """FLIX by SGD: one exchange per step, each on a batch of every client's rows."""

    name = "flix-sgd"
    paper = "FLIX (thesis chapter 3), solved by distributed SGD (section 3.3.2)"
    batch: int | None = 20


@register
@dataclass(frozen=True)
class Scafflix(Flix, ControlVariates):
    """FLIX with local steps, control variates and individual step sizes; cohorts optional."""

    name = "scafflix"
    paper = "Scafflix (thesis chapter 3), Algorithm 2, Theorem 3.3.4"
    sends = "up: (alpha_i^2/gamma_i) local model; down: weighted mean"
    replies = ("xhat",)
    gamma: PerClient | None = None
    p: float | None = None
    batch: int | None = None
    individual: bool = True
    random_steps: bool = True

    def prepare(self, constants: Constants) -> Algorithm:
        """gamma_i = 1/L_i (1/max L when not individual), p = 1/sqrt(kappa_max)."""
        super().prepare(constants)
        gamma = step_sizes(self.gamma, constants, self.individual, self.name)
        return replace(self, gamma=gamma, p=probability(self.p, gamma, constants, self.name))

    def client_init(self, problem: Problem, turn: Turn) -> State:
        own = Flix.client_init(self, problem, turn)
        return {**own, **ControlVariates.client_init(self, problem, turn)}

    def scales(self, turn: Turn, like: Tensor) -> tuple[Tensor, Tensor]:
        assert self.gamma is not None
        return per_client(self.alpha, turn, like), per_client(self.gamma, turn, like)

    def variate_rate(self, turn: Turn, like: Tensor) -> Tensor | float:
        """`p alpha_i / gamma_i`."""
        alpha, gamma = self.scales(turn, like)
        return given(self.p) * alpha / gamma

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        x, stream = received["x"], turn.stream("batch")
        alpha, gamma = self.scales(turn, x)
        for _ in range(local_steps(given(self.p), turn, self.random_steps)):
            g = local_gradient(problem, self.point(client, x, turn), self.batch, stream)
            x = x - (gamma / alpha) * (g - client["h"])
        return self.await_mean(client, x), {"xhat": (alpha.square() / gamma) * x}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """`xbar = sum_i (alpha_i^2/gamma_i) xhat_i / sum_i (alpha_i^2/gamma_i)` over the cohort."""
        alpha, gamma = self.scales(turn, server["x"])
        x = replies["xhat"].sum(0) / (alpha.square() / gamma).sum()
        return self.publish_mean(server, x, turn)

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        alpha, gamma = self.scales(turn, memory["h"])
        return self.await_mean(memory, replies["xhat"] / (alpha.square() / gamma))

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """`||sum alpha_i h_i||`, zero up to rounding."""
        h = control_variates(self, server, client)
        turn = Turn(0, 0, len(h), torch.arange(len(h)))
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
