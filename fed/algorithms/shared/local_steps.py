"""Pieces that algorithms share: how many local steps, which gradient and step size, the proximal
step of the l1 norm, a client's own optimum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, SampledClients, Turn, check, given
from symprune.fed.randomness import Stream


def local_steps(p: float, turn: Turn, random: bool = True) -> int:
    """Steps until the shared coin with P(heads) = p shows heads, or always `round(1/p)`.

    The coin depends on seed and turn only, so every method sees the same sequence."""
    if not random:
        return max(1, round(1 / p))
    if p >= 1:
        return 1
    u = float(turn.shared("coin").uniform(1))
    return 1 + int(math.log1p(-u) / math.log1p(-p))


def local_gradient(
    problem: Problem, w: Tensor, batch: int | None, stream: Stream, clip: float | None = None
) -> Tensor:
    """Full gradient, or that of `batch` rows of each client; `clip` bounds each client's norm."""
    g = problem.gradient(w, problem.step_rows(stream, batch))
    if clip is None:
        return g
    return g * (clip / g.norm(dim=1, keepdim=True).clamp_min(1e-30)).clamp_max(1)


def soft_threshold(w: Tensor, by: float) -> Tensor:
    """`argmin_v by ||v||_1 + 1/2 ||v - w||^2`."""
    return w.sign() * (w.abs() - by).clamp_min(0)


def step_size(gamma: float | None, constants: Constants, name: str) -> float:
    """The given step size, or 1/L_max when the problem's constants are known."""
    if gamma is not None:
        check(gamma > 0, f"{name}: gamma = {gamma} must be positive.")
        return gamma
    check(constants.known, f"{name} needs the option gamma: the problem's smoothness is unknown.")
    return 1 / constants.L_max


def step_sizes(
    gamma: float | tuple[float, ...] | None, constants: Constants, individual: bool, name: str
) -> tuple[float, ...]:
    """A step size for every client: the given ones, or 1/L_i, or 1/L_max if not individual."""
    n = constants.clients
    if gamma is None and individual and constants.known:
        gamma = tuple(1 / L for L in constants.L)
    if not isinstance(gamma, tuple):
        return (float(step_size(gamma, constants, name)),) * n
    check(len(gamma) == n, f"{name}: {len(gamma)} values of gamma for {n} clients.")
    check(min(gamma) > 0, f"{name}: gamma must be positive.")
    return gamma


def probability(
    p: float | None, gamma: float | tuple[float, ...], constants: Constants, name: str
) -> float:
    """The given communication probability, or ProxSkip's `sqrt(gamma mu)`, the least of all
    clients."""
    if p is not None:
        check(0 < p <= 1, f"{name}: p = {p} is outside (0, 1].")
        return p
    usable = constants.known and constants.mu_min > 0
    check(usable, f"{name} needs the option p: the problem is not known to be strongly convex.")
    steps = gamma if isinstance(gamma, tuple) else (gamma,) * constants.clients
    least = min(step * mu for step, mu in zip(steps, constants.mu, strict=True))
    return min(1.0, math.sqrt(least))


def local_optimum(problem: Problem, tolerance: float, max_steps: int) -> Tensor:
    """`argmin f_i` of every client, by Nesterov's method from 0 until `||grad f_i|| <= tolerance`.
    A client that is done stands still, so the others do not change its result."""
    constants = problem.constants()
    check(constants.known, "A client's own optimum needs a problem with known smoothness.")
    L = torch.tensor(constants.L, dtype=problem.dtype).unsqueeze(1)
    mu = torch.tensor(constants.mu, dtype=problem.dtype).unsqueeze(1)
    momentum = (L.sqrt() - mu.sqrt()) / (L.sqrt() + mu.sqrt())
    x = torch.zeros(problem.clients, problem.dimension, dtype=problem.dtype)
    y, going = x, torch.ones(problem.clients, 1, dtype=torch.bool)
    for _ in range(max_steps):
        g = problem.gradient(y)
        going = going & (g.norm(dim=1, keepdim=True) > tolerance)
        if not bool(going.any()):
            break
        ahead = y - g / L
        y = torch.where(going, ahead + momentum * (ahead - x), y)
        x = torch.where(going, ahead, x)
    return y


@dataclass(frozen=True)
class LocalSteps(SampledClients):
    """Base of the methods whose clients make about 1/p gradient steps between two rounds."""

    gamma: float | None = None
    p: float | None = None
    batch: int | None = None
    clip: float | None = None
    random_steps: bool = True

    def prepare(self, constants: Constants) -> Algorithm:
        """gamma = 1/L_max, p = sqrt(gamma mu) (ProxSkip's theory), each unless given."""
        gamma = step_size(self.gamma, constants, self.name)
        return replace(self, gamma=gamma, p=probability(self.p, gamma, constants, self.name))

    def gradients(self, problem: Problem, turn: Turn) -> Iterator[Callable[[Tensor], Tensor]]:
        """One gradient function for every local step of this turn."""
        stream = turn.stream("batch")
        for _ in range(local_steps(given(self.p), turn, self.random_steps)):
            yield lambda w: local_gradient(problem, w, self.batch, stream, self.clip)
