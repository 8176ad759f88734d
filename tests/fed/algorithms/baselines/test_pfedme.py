"""pFedMe against the closed forms of the Moreau envelope of quadratics."""

from __future__ import annotations

import pytest
import torch

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.problems.problem import Problem
from symprune.fed.problems.quadratic import quadratic
from symprune.fed.simulate import Result, simulate

A = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
Y = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
EXACT = {"local_rounds": 1, "inner_steps": 200, "lr": 0.2, "batch": None}


@pytest.fixture(scope="module")
def parabolas() -> Problem:
    """`f_i(w) = a_i/2 (w - y_i)^2`."""
    return quadratic(A.view(3, 1, 1), (A * Y).view(3, 1))


def run(problem: Problem, lam: float, **options: float) -> Result:
    return simulate(build("pfedme", lam=lam, eta=1.0, **{**EXACT, **options}), problem, 60)


def test_the_shared_model_minimises_the_mean_of_the_envelopes(parabolas: Problem) -> None:
    c = A / (A + 0.7)
    assert abs(float(run(parabolas, 0.7).model) - float((c * Y).sum() / c.sum())) < 1e-9


def test_personal_models_are_the_proximal_points_of_the_shared_one(parabolas: Problem) -> None:
    result = run(parabolas, 0.7)
    expected = (A * Y + 0.7 * result.model) / (A + 0.7)
    assert torch.allclose(result.client["theta"].squeeze(1), expected, atol=1e-9)


def test_one_local_round_is_a_gradient_step_on_the_envelope(parabolas: Problem) -> None:
    start = torch.tensor([2.0], dtype=torch.float64)
    algorithm = build("pfedme", lam=0.7, eta=0.3, beta=0.5, **EXACT)
    after = simulate(algorithm, parabolas, 1, x0=start).model
    gradient = (A * 0.7 / (A + 0.7) * (start - Y)).mean()
    assert torch.allclose(after, start - 0.5 * 0.3 * gradient, atol=1e-10)


def test_clients_that_are_not_drawn_keep_their_models(parabolas: Problem) -> None:
    before = simulate(build("pfedme", cohort_size=1, **EXACT), parabolas, 1)
    after = simulate(build("pfedme", cohort_size=1, **EXACT), parabolas, 2)
    moved = (before.client["theta"] != after.client["theta"]).any(1)
    assert int(moved.sum()) <= 1


def test_a_step_that_is_not_positive_is_named(parabolas: Problem) -> None:
    with pytest.raises(SympruneError, match="eta = 0"):
        simulate(build("pfedme", eta=0.0), parabolas, 1)
