"""What SPPM-AS promises: error bounds, the step rule, costs, and whether K > 1 is worth it.

Cohort Squeeze, thesis chapter 5: Theorem 5.3.2, the iteration complexity of appendix D.6.5, the
lemma on inexact steps of D.6.9 and the cost model of section 5.4.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log

import torch
from torch import Tensor

from symprune.fed.algorithms.cohort_squeeze.sampling import Sampling
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import check


def floor(gamma: float, mu: float, variance: float) -> float:
    """The squared distance that remains: `gamma sigma2 / (gamma mu^2 + 2 mu)`."""
    return gamma * variance / (gamma * mu**2 + 2 * mu)


def bound(gamma: float, mu: float, variance: float, start: float, t: int) -> float:
    """Theorem 5.3.2 for any gamma > 0; `start` is `||x_0 - x*||^2`."""
    return (1 + gamma * mu) ** (-2 * t) * start + floor(gamma, mu, variance)


def step_rule(epsilon: float, mu: float, variance: float, start: float) -> tuple[float, int]:
    """`(gamma, T)` that reach `E||x_T - x*||^2 <= epsilon`, for epsilon <= sigma2 / mu^2."""
    reach = variance / mu**2
    check(0 < epsilon <= reach, f"epsilon = {epsilon} is outside (0, sigma2/mu^2 = {reach:.3g}].")
    steps = (reach / (2 * epsilon) + 0.5) * log(2 * start / epsilon)
    return epsilon * mu / variance, max(0, ceil(steps))


def inexact_bound(
    gamma: float, mu: float, variance: float, start: float, t: int, error: float, s: float
) -> float:
    """The bound when every proximal step is off by `error` (squared distance), for any
    `0 < s < gamma^2 mu^2 + 2 gamma mu`."""
    room = (1 + gamma * mu) ** 2 - 1 - s
    check(s > 0 and room > 0, f"s = {s} is outside (0, gamma^2 mu^2 + 2 gamma mu).")
    rate = (1 + s) / (1 + gamma * mu) ** 2
    rest = (1 + s) * (gamma**2 * variance + error * (1 + gamma * mu) ** 2 / s) / room
    return rate**t * start + rest


def cost(K: int, T: int, local_cost: float = 1.0, global_cost: float = 0.0) -> float:
    """`(c1 K + c2) T`; with K = 1 this is the cost of LocalGD."""
    return (local_cost * K + global_cost) * T


def minibatch_step(L: float, L_max: float, n: int, size: int) -> float:
    """`1 / (2 L_nice)`, the step of minibatch methods with nice sampling (expected smoothness,
    Gower et al. 2019), which the thesis takes for its baselines."""
    if n == 1:
        return 1 / (2 * L)
    both = n * (size - 1) / (size * (n - 1)) * L + (n - size) / (size * (n - 1)) * L_max
    return 1 / (2 * both)


@dataclass(frozen=True)
class Outlook:
    """Whether several local rounds per cohort can pay on a problem."""

    mu: float
    variance: float
    reach: float  # sigma2 / mu^2: the floor for large gamma
    condition: float  # L / mu
    warning: str | None


def outlook(problem: Problem, sampling: Sampling, optimum: Tensor, epsilon: float) -> Outlook:
    """K > 1 pays if the floor for large gamma is not far above the goal epsilon and one gradient
    step is poor (L/mu large); `warning` says which of the two is missing."""
    constants = problem.constants()
    mu = sampling.strong_convexity(constants.mu)
    check(mu > 0, "The outlook needs strongly convex clients; give the problem an l2 term.")
    variance = sampling.variance(problem.gradient(optimum.to(problem.dtype)))
    reach, condition = variance / mu**2, constants.L_f / mu
    warning = None
    if reach > 2 * epsilon:
        warning = (
            f"the floor {reach:.2g} of large steps is above the goal {epsilon:.2g}: more local "
            "rounds per cohort will hardly pay; find more homogeneous strata"
        )
    elif condition < 10:
        warning = f"L/mu = {condition:.2g} is small: one gradient step per cohort does as well"
    return Outlook(mu, variance, reach, condition, warning)


def exact_prox(
    problem: Problem, x: Tensor, gamma: float, weights: Tensor, steps: int = 100
) -> Tensor:
    """`argmin_z sum_i weights_i f_i(z) + ||z - x||^2 / (2 gamma)` over the clients of `problem`,
    by damped Newton in float64; the reference that the solvers are measured against."""
    from symprune.fed.problems.optimum import hessian

    weights, x = weights.double(), x.double()
    eye = torch.eye(len(x), dtype=torch.float64)

    def value(z: Tensor) -> float:
        return float(weights @ problem.value(z).double() + (z - x) @ (z - x) / (2 * gamma))

    z = x
    for _ in range(steps):
        gradient = weights @ problem.gradient(z).double() + (z - x) / gamma
        if float(gradient.norm()) < 1e-12 * max(1.0, 1 / gamma):
            break
        scale = weights.unsqueeze(1) * problem.clients
        curvature = hessian(problem, z.expand(problem.clients, -1), scale) + eye / gamma
        step, size, before = torch.linalg.solve(curvature, gradient), 1.0, value(z)
        while size > 1e-6 and value(z - size * step) > before:
            size /= 2
        z = z - (size if size > 1e-6 else 1.0) * step
    return z
