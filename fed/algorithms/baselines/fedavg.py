"""FedAvg and FedProx: local steps without control variates.

McMahan et al. and Li et al. The number of local steps follows the same coin as ProxSkip's, so
methods compare step for step. The variants that prune are in `fedht.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.algorithms.shared.local_steps import LocalSteps
from symprune.fed.compressors import parse
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import (
    Algorithm,
    Like,
    Message,
    Received,
    State,
    Turn,
    check,
    given,
)
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class FedAvg(LocalSteps):
    """Local gradient steps from the common model, then the mean of the local models."""

    name = "fedavg"
    paper = "McMahan et al.: Communication-efficient learning of deep networks"
    sends = "up: local model, or its compressed change; down: mean model"
    averages = True
    p: float | None = 0.1  # 1/p local steps a round on average
    compressor: str = "identity"  # of w - x, which is then what is sent

    def after_step(self, w: Tensor) -> Tensor:
        return w

    def after_mean(self, w: Tensor) -> Tensor:
        return w

    def direction(self, gradient: Tensor, w: Tensor, x: Tensor) -> Tensor:
        """What a local step from `w` goes against."""
        return gradient

    def prepare(self, constants: Constants) -> Algorithm:
        parse(self.compressor).constants(constants.dimension)
        return super().prepare(constants)

    @property
    def sends_update(self) -> bool:
        return self.compressor != "identity"

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        w = x = received["x"]
        for gradient in self.gradients(problem, turn):
            step = given(self.gamma) * self.direction(gradient(w), w, x)
            w = self.after_step(torch.sub(w, step, out=step))  # a stack of models: no new memory
        return client, self.reply(w, x, turn)

    def reply(self, w: Tensor, x: Tensor, turn: Turn) -> Message:
        if self.sends_update:
            return {"update": parse(self.compressor).sent(w - x, turn.stream("compress"))}
        return {"w": w}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        if self.sends_update:
            return {"x": self.after_mean(server["x"] + replies["update"].mean(0))}
        return {"x": self.after_mean(replies["w"].mean(0))}

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        x = server["x"]
        return {"update" if self.sends_update else "w": Like(x.dtype, tuple(x.shape))}


@register
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients minimise f_i(w) + mu_prox/2 ||w - x||^2."""

    name = "fedprox"
    paper = "Li et al.: Federated optimization in heterogeneous networks"
    mu_prox: float = 0.1

    def prepare(self, constants: Constants) -> Algorithm:
        """gamma = 1/(L_max + mu_prox): the proximal term adds to the smoothness."""
        check(self.mu_prox >= 0, f"fedprox: mu_prox = {self.mu_prox} must not be negative.")
        if self.gamma is None and constants.known:
            gamma = 1 / (constants.L_max + self.mu_prox)
            return replace(self, gamma=gamma).prepare(constants)
        return super().prepare(constants)

    def direction(self, gradient: Tensor, w: Tensor, x: Tensor) -> Tensor:
        return gradient + self.mu_prox * (w - x)
