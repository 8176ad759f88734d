"""Solvers of a proximal step `min_z F(z) = f_S(z) + ||z - x||^2 / (2 gamma)`, at the hub or, in
part, at the clients.

Cohort Squeeze (thesis chapter 5, Algorithm 8 and table of solvers). A hub's solver only says where
to ask next and takes in F and its gradient there: one question is one local communication round, so
a line search pays for every trial. Its state is a dictionary of tensors with `z` (ask here),
`accepted` (best certain point), `ahead` (that point plus one more step for which nobody needs to be
asked) and `iterations` (steps accepted so far). The clients' part, where they have one, is LocalGD
inside the cohort, or Adam for networks, whose state is new in every local round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from symprune.fed.problems.problem import Problem
from symprune.fed.randomness import Stream

State = dict[str, Tensor]
ARMIJO = 1e-4  # share of the predicted decrease a step must bring
CURVATURE = 0.3  # share of the slope that may be left along a conjugate direction
TRIALS = 12  # questions per line search at most


class ProxSolver(Protocol):
    def start(self, x: Tensor) -> State: ...

    def tell(self, state: State, value: Tensor, gradient: Tensor) -> State: ...


@dataclass(frozen=True)
class Curvature:
    """What is known of F: a step `1/L` and, for acceleration, the condition number."""

    step: float
    condition: float = 1.0


@dataclass(frozen=True)
class GradientDescent:
    """`z <- z - step * grad F(z)`."""

    known: Curvature

    def start(self, x: Tensor) -> State:
        return {"z": x, "accepted": x, "ahead": x, "iterations": torch.tensor(0)}

    def tell(self, state: State, value: Tensor, gradient: Tensor) -> State:
        z = state["z"] - self.known.step * gradient
        return {"z": z, "accepted": z, "ahead": z, "iterations": state["iterations"] + 1}


@dataclass(frozen=True)
class Accelerated(GradientDescent):
    """Nesterov's method with the constant momentum (sqrt(kappa) - 1) / (sqrt(kappa) + 1)."""

    def tell(self, state: State, value: Tensor, gradient: Tensor) -> State:
        root = self.known.condition**0.5
        there = state["z"] - self.known.step * gradient
        z = there + (root - 1) / (root + 1) * (there - state["accepted"])
        count = state["iterations"] + 1
        return {"z": z, "accepted": there, "ahead": there, "iterations": count}


@dataclass(frozen=True)
class ConjugateGradient:
    """Polak-Ribiere+ directions. Along a direction the slope is brought below 0.3 of its first
    value by secants inside a bracket; a direction that does not descend is replaced by -gradient.
    """

    known: Curvature

    def start(self, x: Tensor) -> State:
        zero, none = torch.zeros_like(x), x.new_zeros(())
        return {
            **{"z": x, "accepted": x, "ahead": x, "iterations": torch.tensor(0)},
            **{"value": none, "gradient": zero, "direction": zero, "asked": torch.tensor(0)},
            **{"size": none, "low": none, "high": none},
        }

    def tell(self, state: State, value: Tensor, gradient: Tensor) -> State:
        if int(state["asked"]) == 0:
            return self._turn(state, state["z"], value, gradient, -gradient, self.known.step)
        slope0 = state["gradient"] @ state["direction"]
        slope, size = gradient @ state["direction"], state["size"]
        down = value <= state["value"] + ARMIJO * size * slope0 + _rounding(value)
        flat = slope.abs() <= CURVATURE * slope0.abs()
        if bool(down & flat) or int(state["asked"]) > TRIALS:
            if not bool(value <= state["value"] + _rounding(value)):
                here, g = state["accepted"], state["gradient"]
                return self._turn(state, here, state["value"], g, -g, self.known.step)
            return self._next(state, value, gradient)
        high = torch.where((slope > 0) | ~down, size, state["high"])
        low = torch.where((slope > 0) | ~down, state["low"], size)
        guess = size * slope0 / (slope0 - slope) if bool(slope > slope0) else 4 * size
        if bool(high > 0):
            guess = guess.clamp(low + 0.05 * (high - low), high - 0.05 * (high - low))
        else:
            guess = guess.clamp(1.1 * size, 4 * size)
        z = state["accepted"] + guess * state["direction"]
        moved = {"z": z, "ahead": z, "size": guess, "low": low, "high": high}
        return {**state, **moved, "asked": state["asked"] + 1}

    def _next(self, state: State, value: Tensor, gradient: Tensor) -> State:
        """Accept the point that was asked and turn to the next conjugate direction; the size that
        was right for the last one is the first guess."""
        last = state["gradient"]
        beta = (gradient @ (gradient - last) / (last @ last).clamp_min(1e-30)).clamp_min(0)
        direction = -gradient + beta * state["direction"]
        if bool(gradient @ direction >= 0):
            direction = -gradient
        size = float(state["size"])
        turned = self._turn(state, state["z"], value, gradient, direction, size)
        return {**turned, "iterations": state["iterations"] + 1}

    def _turn(
        self, state: State, at: Tensor, value: Tensor, g: Tensor, direction: Tensor, size: float
    ) -> State:
        """Begin a line search from `at`; the step that needs no question is the safe one of an
        L-smooth function, `-<g, d> / (L ||d||^2)`."""
        length = (direction @ direction).clamp_min(1e-30)
        safe = at - self.known.step * (g @ direction) / length * direction
        none = torch.zeros_like(value)
        return {
            **{"z": at + size * direction, "accepted": at, "ahead": safe, "value": value},
            **{"iterations": state["iterations"], "gradient": g, "direction": direction},
            **{"asked": torch.tensor(1), "size": none + size, "low": none, "high": none},
        }


@dataclass(frozen=True)
class LBFGS:
    """Limited-memory BFGS with unit steps, halved only when F did not fall enough; the first step
    is `1/L` times the gradient."""

    known: Curvature
    memory: int = 20

    def start(self, x: Tensor) -> State:
        pairs, none = x.new_zeros(self.memory, len(x)), x.new_zeros(())
        zero = torch.zeros_like(x)
        return {
            **{"z": x, "accepted": x, "ahead": x, "iterations": torch.tensor(0)},
            **{"value": none, "gradient": zero, "direction": zero, "size": none},
            **{"moves": pairs, "changes": pairs, "pairs": torch.tensor(0)},
        }

    def tell(self, state: State, value: Tensor, gradient: Tensor) -> State:
        if not bool(state["direction"].any()) and not bool(state["gradient"].any()):
            return self._go(state, state["z"], value, gradient)
        slope = state["gradient"] @ state["direction"]
        enough = state["value"] + ARMIJO * state["size"] * slope + _rounding(value)
        if bool(value > enough) and float(state["size"]) > 2.0**-TRIALS:
            size = state["size"] / 2
            z = state["accepted"] + size * state["direction"]
            return {**state, "z": z, "ahead": z, "size": size}
        state = self._remember(state, state["z"] - state["accepted"], gradient - state["gradient"])
        turned = self._go(state, state["z"], value, gradient)
        return {**turned, "iterations": state["iterations"] + 1}

    def _remember(self, state: State, move: Tensor, change: Tensor) -> State:
        if bool(move @ change <= 1e-10 * move.norm() * change.norm()):
            return state  # no positive curvature along this move: it would spoil the matrix
        return {
            **state,
            "moves": torch.cat([state["moves"][1:], move.unsqueeze(0)]),
            "changes": torch.cat([state["changes"][1:], change.unsqueeze(0)]),
            "pairs": (state["pairs"] + 1).clamp_max(self.memory),
        }

    def _go(self, state: State, at: Tensor, value: Tensor, gradient: Tensor) -> State:
        direction = -self._inverse_hessian_times(state, gradient)
        z = at + direction
        moved = {"z": z, "accepted": at, "ahead": z, "value": value, "gradient": gradient}
        return {**state, **moved, "direction": direction, "size": torch.ones_like(value)}

    def _inverse_hessian_times(self, state: State, gradient: Tensor) -> Tensor:
        """The two-loop recursion over the pairs held, newest last."""
        held = range(self.memory - int(state["pairs"]), self.memory)
        moves, changes, q, shares = state["moves"], state["changes"], gradient, {}
        for i in reversed(held):
            shares[i] = (moves[i] @ q) / (moves[i] @ changes[i])
            q = q - shares[i] * changes[i]
        if len(held):
            q = q * (moves[-1] @ changes[-1]) / (changes[-1] @ changes[-1])
        else:
            q = q * self.known.step
        for i in held:
            q = q + (shares[i] - (changes[i] @ q) / (moves[i] @ changes[i])) * moves[i]
        return q


def _rounding(value: Tensor) -> Tensor:
    """What two values of F may differ by without meaning anything."""
    return 8 * torch.finfo(value.dtype).eps * value.abs()


HUB_SOLVERS: dict[str, Callable[..., ProxSolver]] = {
    "gd": GradientDescent,
    "agd": Accelerated,
    "cg": ConjugateGradient,
    "lbfgs": LBFGS,
}


@dataclass(frozen=True)
class Worker:
    """How a client works between two local rounds."""

    gamma: float
    step: float
    steps: int
    batch: int | None = None
    adam: bool = False


def train_near(problem: Problem, x: Tensor, z: Tensor, how: Worker, stream: Stream) -> Tensor:
    """Local steps from z with a pull to x. The hub makes the weights of the models sum to 1, so
    the pull is exact when those of the sampling do."""
    w, first, second = z, torch.zeros_like(z), torch.zeros_like(z)
    for number in range(1, how.steps + 1):
        rows = problem.step_rows(stream, how.batch)
        g = problem.gradient(w, rows) + (w - x) / how.gamma
        if not how.adam:
            w = w - how.step * g
            continue
        first = 0.9 * first + 0.1 * g
        second = 0.999 * second + 0.001 * g.square()
        size = (second / (1 - 0.999**number)).sqrt() + 1e-8
        w = w - how.step * (first / (1 - 0.9**number)) / size
    return w
