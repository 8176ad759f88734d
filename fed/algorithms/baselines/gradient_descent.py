"""Distributed gradient descent, plain (GD) and with compressed gradients (DCGD).

DCGD has no memory: with a biased compressor, or clients that differ, it stalls away from the
optimum, which is what the control variates of EF-BV repair (thesis chapter 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from symprune.fed.compressors import parse
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Message, Received, State, Turn, check
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class DCGD(Algorithm):
    """Gradient descent on compressed gradients: x <- x - gamma * mean C_i(grad f_i(x))."""

    name = "dcgd"
    paper = "Compressed gradient descent without memory (thesis chapter 2, introduction)"
    sends = "up: C(gradient); down: x"
    replies = ("g",)
    averages = True
    compressor: str = "identity"
    gamma: float | None = None

    def prepare(self, constants: Constants) -> Algorithm:
        """gamma = 1 / (L (1 + omega/n)), the step that is safe for unbiased compression."""
        if self.gamma is not None:
            check(self.gamma > 0, f"{self.name}: gamma = {self.gamma} must be positive.")
            return self
        check(constants.known, f"{self.name} needs gamma: the problem's smoothness is unknown.")
        omega = parse(self.compressor).constants(constants.dimension).omega
        noise = constants.L_max * omega / constants.clients
        return replace(self, gamma=1 / (constants.L_f + noise))

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        compressor = parse(self.compressor)
        g = problem.gradient(received["x"])
        return client, {"g": compressor.sent(g, turn.stream("compress"))}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        return {"x": server["x"] - self.gamma * replies["g"].mean(0)}


@register
@dataclass(frozen=True)
class GD(DCGD):
    """Gradient descent with one full exchange per step: x <- x - gamma * mean grad f_i(x)."""

    name = "gd"
    paper = "Distributed gradient descent"
    sends = "up: gradient; down: x"
