"""EF-BV and its special cases EF21 and DIANA (thesis chapter 2, Algorithm 1, section 2.3, Theorems
2.4.1 and 2.4.2, appendix A).

Every worker sends `d_i = C_i(grad f_i(x) - h_i)`; the control variates `h_i` learn the gradients at
the optimum, so the compression error vanishes there. Two scalings: `lam` for the control variates,
`nu` for the gradient estimate `g = h + nu mean d_i`. EF21 has nu = lam, so its estimate is the mean
of the control variates; DIANA has nu = 1, so its estimate is unbiased when the compressor is. Both
have step sizes of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.algorithms.shared.local_steps import soft_threshold
from symprune.fed.compressors import CompressionConstants, best_scaling, parse
from symprune.fed.participation import Nice
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
)
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class EFBV(SampledClients):
    """Error feedback with bias and variance: any compressor, both scalings from theory."""

    name = "ef-bv"
    paper = "EF-BV (thesis chapter 2), Algorithm 1, Theorems 2.4.1 and 2.4.2"
    sends = "up: C(gradient - h_i); down: x"
    replies = ("d",)
    compressor: str = "int4"
    lam: float | None = None
    nu: float | None = None
    gamma: float | None = None
    l1: float = 0.0  # R(x) = l1 ||x||_1
    nonconvex: bool = False

    def noise(self, constants: Constants) -> tuple[CompressionConstants, float]:
        """eta and omega of one worker's message, and the average variance of all of them."""
        own, n = parse(self.compressor).constants(constants.dimension), constants.clients
        if self.cohort_size is None:
            return own, own.omega / n
        return Nice(self.cohort_size, n).after(own)

    def scalings(self, noise: CompressionConstants, omega_av: float) -> tuple[float, float]:
        lam = noise.best_scaling if self.lam is None else self.lam
        return lam, best_scaling(noise.eta, omega_av) if self.nu is None else self.nu

    def step(self, constants: Constants, noise: CompressionConstants, omega_av: float) -> float:
        assert self.lam is not None and self.nu is not None
        r = remainder(self.lam, noise.eta, noise.omega)
        r_av = remainder(self.nu, noise.eta, omega_av)
        check(r < 1, f"{self.name}: lam = {self.lam} leaves r = {r:.4g}, which must be below 1.")
        L = constants.L_f * (2 if self.l1 else 1)
        return largest_step(L, constants.L_tilde, r, r_av, self.nonconvex)

    def prepare(self, constants: Constants) -> Algorithm:
        """lam*, nu* and the largest step size of the theorems, each unless given."""
        noise, omega_av = self.noise(constants)
        lam, nu = self.scalings(noise, omega_av)
        for name, value in (("lam", lam), ("nu", nu)):
            check(0 < value <= 1, f"{self.name}: {name} = {value} is outside (0, 1].")
        check(self.l1 >= 0, f"{self.name}: l1 = {self.l1} must not be negative.")
        chosen = replace(self, lam=lam, nu=nu)
        if self.gamma is not None:
            check(self.gamma > 0, f"{self.name}: gamma = {self.gamma} must be positive.")
            return chosen
        check(constants.known, f"{self.name} needs gamma: the problem's smoothness is unknown.")
        return replace(chosen, gamma=chosen.step(constants, noise, omega_av))

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {"x": x0, "h": torch.zeros_like(x0)}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        return {"h": torch.zeros(problem.clients, problem.dimension, dtype=problem.dtype)}

    def weight(self, turn: Turn) -> float:
        """n/m for the m participants, so that their sum over n is an unbiased mean."""
        return turn.n / (self.cohort_size or turn.n)

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        compressor = parse(self.compressor)
        difference = problem.gradient(received["x"]) - client["h"]
        sent = compressor.sent(difference, turn.stream("compress"))
        d = sent.tensor
        assert isinstance(d, Tensor)
        h = client["h"] + given(self.lam) * self.weight(turn) * d
        return {"h": h}, {"d": sent}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        d = self.weight(turn) * replies["d"].sum(0) / turn.n
        g = server["h"] + self.nu * d  # with the old h
        x = server["x"] - self.gamma * g
        if self.l1:
            x = soft_threshold(x, given(self.gamma) * self.l1)
        return {"x": x, "h": server["h"] + self.lam * d}

    def memory(self, server: State, turn: Turn) -> State:
        return {"h": torch.zeros(turn.n, *server["h"].shape, dtype=server["h"].dtype)}

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        return {"h": memory["h"] + given(self.lam) * self.weight(turn) * replies["d"]}


@register
@dataclass(frozen=True)
class EF21(EFBV):
    """EF-BV with nu = lam; its step size knows nothing of averaging over workers (r_av = r)."""

    name = "ef21"
    paper = "EF21, as in EF-BV (thesis chapter 2), section 2.3 and Table A.2"
    compressor: str = "int8"  # coarser ones cost more in the step than they save

    def scalings(self, noise: CompressionConstants, omega_av: float) -> tuple[float, float]:
        lam = noise.best_scaling if self.lam is None else self.lam
        return lam, lam if self.nu is None else self.nu

    def step(self, constants: Constants, noise: CompressionConstants, omega_av: float) -> float:
        return super().step(constants, noise, noise.omega)


@register
@dataclass(frozen=True)
class DIANA(EFBV):
    """EF-BV with nu = 1; unbiased compression has DIANA's own, larger step size."""

    name = "diana"
    paper = "DIANA, as in EF-BV (thesis chapter 2), section 2.3, Proposition 2.4.6, appendix A.2"

    def scalings(self, noise: CompressionConstants, omega_av: float) -> tuple[float, float]:
        """`lam*`, which is DIANA's `1 / (1 + omega)` when the compressor is unbiased; for a biased
        one that would leave r >= 1."""
        lam = noise.best_scaling if self.lam is None else self.lam
        return lam, 1.0 if self.nu is None else self.nu

    def step(self, constants: Constants, noise: CompressionConstants, omega_av: float) -> float:
        """`1 / (L_max (1 + (1+sqrt 2)^2 omega_av))` (Proposition 2.4.6, which allows R); it is for
        unbiased compressors and convex f, others have EF-BV's step (Theorems A.2.1 and A.2.2). The
        text prints omega_max; the proof has omega_av."""
        if noise.eta > 0 or self.nonconvex:
            return super().step(constants, noise, omega_av)
        return 1 / (constants.L_max * (1 + (1 + math.sqrt(2)) ** 2 * omega_av))


def remainder(scaling: float, eta: float, omega: float) -> float:
    """`r = (1 - lam + lam eta)^2 + lam^2 omega`: how much of the error is left after one step."""
    return (1 - scaling + scaling * eta) ** 2 + scaling**2 * omega


def largest_step(L: float, L_tilde: float, r: float, r_av: float, nonconvex: bool) -> float:
    """`1 / (L + L_tilde sqrt(r_av/r) / s)` with `s* = sqrt((1+r)/(2r)) - 1`, or for nonconvex f
    `s = 1/sqrt(r) - 1`; written so that r = 0 needs no special case."""
    gap = (1 if nonconvex else math.sqrt((1 + r) / 2)) - math.sqrt(r)
    return 1 / (L + L_tilde * math.sqrt(r_av) / gap)
