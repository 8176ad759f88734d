"""Reference solutions by Newton's method, for tests and for the distance to the optimum."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.problems.problem import Problem
from symprune.fed.problems.quadratic import Quadratic


def minimise(
    problem: Problem,
    alpha: Tensor | None = None,
    centres: Tensor | None = None,
    steps: int = 100,
    tolerance: float = 1e-13,
) -> Tensor:
    """`argmin (1/n) sum_i f_i(alpha_i x + (1-alpha_i) centre_i)` (FLIX); alpha = 1 is the plain
    problem. Damped Newton in float64."""
    if problem.nonconvex or not (
        isinstance(problem, Quadratic) or hasattr(problem.loss, "row_curvature")
    ):
        raise SympruneError(f"No reference solver for {problem.name}: it has no closed Hessian.")
    problem = in_doubles(problem)
    a = torch.ones(problem.clients, 1, dtype=torch.float64) if alpha is None else alpha.view(-1, 1)
    shift = 0 if centres is None else (1 - a) * centres
    x = torch.zeros(problem.dimension, dtype=torch.float64)

    def value(point: Tensor) -> float:
        return float(problem.value(a * point + shift).mean())

    for _ in range(steps):
        points = a * x + shift
        gradient = (a * problem.gradient(points)).mean(0)
        if float(gradient.norm()) < tolerance:
            break
        step = torch.linalg.solve(hessian(problem, points, a.square()), gradient)
        size, before = 1.0, value(x)
        while size > 1e-8 and value(x - size * step) > before:
            size /= 2
        if size <= 1e-8:
            size = 1.0 if float(gradient.norm()) < 1e-9 else 0.0
        x = x - size * step
    return x


def in_doubles(problem: Problem) -> Problem:
    """The same rows in float64, whatever a run of the problem computes in."""
    rows = problem.rows
    wide = {name: getattr(rows, name).double() for name in ("x", "y", "weights")}
    return (
        problem if problem.dtype == torch.float64 else replace(problem, rows=replace(rows, **wide))
    )


def local_minimisers(problem: Problem) -> Tensor:
    """Every client's own optimum, `[C, d]`."""
    each = [minimise(problem.select(slice(i, i + 1))) for i in range(problem.clients)]
    return torch.stack(each)


def hessian(problem: Problem, points: Tensor, scale: Tensor) -> Tensor:
    """`mean_i scale_i hess f_i(points_i)`."""
    if isinstance(problem, Quadratic):
        return (scale.unsqueeze(-1) * problem.rows.x).mean(0)
    rows = problem.rows
    curvature = problem.loss.row_curvature(points, rows.x, rows.weights)  # type: ignore[attr-defined]
    flat = rows.x.reshape(-1, rows.x.shape[-1])
    weighted = (curvature * scale).reshape(-1, 1) / problem.clients
    ridge = problem.l2 * float(scale.mean())
    whole = flat.T @ (flat * weighted) + ridge * torch.eye(flat.shape[1], dtype=flat.dtype)
    return problem.layout.gather(problem.layout.gather(whole).T)
