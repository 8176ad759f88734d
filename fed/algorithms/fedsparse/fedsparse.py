"""FedSparse: hard EM with a spike-and-slab prior; every group of weights has a learned gate.

An Expectation-Maximization Perspective on Federated Learning, section 3 and Algorithms 1 and 2 (the
clients' side is in `gated.py`). With penalties of zero and thresholds of zero all gates are open
and this is `fedopt`, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from symprune.fed.algorithms.fedsparse.em import server_rate
from symprune.fed.algorithms.fedsparse.gates import (
    Gated,
    gate_logit,
    initial_threshold,
    server_directions,
    threshold_slope,
)
from symprune.fed.algorithms.fedsparse.server_optimizers import ascend, moments
from symprune.fed.problems.problem import Constants
from symprune.fed.protocol import Algorithm, Received, State, Turn, check
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class FedSparse(Gated):
    """Learned gates per neuron or weight; traffic is sparse in both directions."""

    name = "fedsparse"
    paper = "Louizos et al.: An EM Perspective on Federated Learning, Algorithms 1 and 2"
    sends = "up: gate sample and weights behind open gates; down: weights and thresholds not pruned"
    temperature: float = 1e-3
    server_optimizer: str = "adam"
    server_lr: float | None = None  # None: Adam 1e-3, plain steps 1/(cohort size)
    server_gate_lr: float = 1e-2  # of the server's Adamax

    def prepare(self, constants: Constants) -> Algorithm:
        check(self.temperature > 0, f"temperature = {self.temperature} must be positive.")
        ready = super().prepare(constants)
        cohort = self.cohort_size or constants.clients
        rate = server_rate(self.server_optimizer, self.server_lr, cohort)
        return replace(ready, server_lr=rate)  # type: ignore[call-arg]

    def logit(self, w: Tensor, v: Tensor) -> Tensor:
        return gate_logit(self.groups.norm(w), v, self.temperature)

    def logit_slope(self, v: Tensor) -> Tensor:
        return threshold_slope(v, self.temperature)

    def initial_gates(self, x0: Tensor) -> Tensor:
        norm = self.groups.norm(x0.unsqueeze(0)).squeeze(0)
        return initial_threshold(norm, self.temperature, self.theta)

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        state = super().server_init(x0, turn)
        return {**state, **moments(x0, "x"), **moments(state["v"], "v")}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        z, z_weights, w_s = self.unpack_replies(server, replies)
        x, v = server["x"], server["v"]
        logit = self.logit(x.unsqueeze(0), v.unsqueeze(0))[0]
        for_w, for_v = server_directions(z, w_s, x, z_weights, logit, v, self.temperature)
        assert self.server_lr is not None
        new_x, moved = ascend(self.server_optimizer, x, for_w, server, "x", self.server_lr)
        for_v = for_v * server["alive"]
        new_v, gates_moved = ascend("adamax", v, for_v, server, "v", self.server_gate_lr)
        v = torch.where(server["alive"], new_v, v)
        return self.prune_groups({**server, **moved, **gates_moved, "x": new_x, "v": v})


@register
@dataclass(frozen=True)
class FedSparseEM(Gated):
    """FedSparse with free gate probabilities and the closed M-step (paper, Eqs. 19 to 22)."""

    name = "fedsparse-em"
    paper = "Louizos et al.: An EM Perspective on Federated Learning, Eqs. 20 to 22"
    sends = "up: gate sample and weights behind open gates; down: weights and gates not pruned"
    gate_lr: float = 0.1
    theta: float = 0.9

    def logit(self, w: Tensor, v: Tensor) -> Tensor:
        return v

    def logit_slope(self, v: Tensor) -> Tensor:
        return torch.ones_like(v)

    def initial_gates(self, x0: Tensor) -> Tensor:
        return torch.full((self.groups.count,), log(self.theta / (1 - self.theta)), dtype=x0.dtype)

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """`theta = mean z_s`, `w = sum z_s w_s / sum z_s`, unchanged where nobody has z = 1. (One
        sample is unbiased for theta but not for this ratio, though the paper writes it so.)"""
        z, z_weights, w_s = self.unpack_replies(server, replies)
        total = z_weights.sum(0)
        x = torch.where(total > 0, (z_weights * w_s).sum(0) / total.clamp_min(1), server["x"])
        theta = z.mean(0).clamp(1e-3, 1 - 1e-3)
        v = torch.where(server["alive"], torch.log(theta / (1 - theta)), server["v"])
        return self.prune_groups({**server, "x": x, "v": v})
