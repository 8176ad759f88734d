"""FedAvg, FedProx and Ditto on parabolas, against their local steps written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from symprune.fed.algorithms import build
from symprune.fed.algorithms.shared.local_steps import local_gradient
from symprune.fed.problems.problem import Problem
from symprune.fed.problems.quadratic import quadratic
from symprune.fed.protocol import Turn
from symprune.fed.simulate import simulate

A = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
Y = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
START = torch.tensor([2.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def parabolas() -> Problem:
    """`f_i(w) = a_i/2 (w - y_i)^2`."""
    return quadratic(A.view(3, 1, 1), (A * Y).view(3, 1))


def local_models(pull: float, steps: int, gamma: float) -> Tensor:
    """`steps` of gradient descent on `f_i(w) + pull/2 (w - x)^2` from x, for every client."""
    w = START.expand(3)
    for _ in range(steps):
        w = w - gamma * (A * (w - Y) + pull * (w - START))
    return w


@pytest.mark.parametrize(("name", "pull"), [("fedavg", 0.0), ("fedprox", 0.8)])
def test_a_round_is_the_mean_of_local_steps(name: str, pull: float, parabolas: Problem) -> None:
    options = {"mu_prox": pull} if pull else {}
    algorithm = build(name, gamma=0.1, p=0.25, random_steps=False, **options)
    after = simulate(algorithm, parabolas, 1, x0=START).model
    torch.testing.assert_close(after, local_models(pull, 4, 0.1).mean().view(1))


def test_a_strong_pull_keeps_clients_at_the_shared_model(parabolas: Problem) -> None:
    options = {"p": 0.05, "random_steps": False}
    moved = [
        float(
            (simulate(build(name, **options, **more), parabolas, 1, x0=START).model - START).abs()
        )
        for name, more in (("fedavg", {"gamma": 0.1}), ("fedprox", {"mu_prox": 50.0}))
    ]
    assert moved[1] < 0.1 * moved[0]


def test_clipping_bounds_the_gradient_of_each_client(parabolas: Problem) -> None:
    w = START.expand(3, 1)
    gradient = (A * (START - Y)).view(3, 1)
    turn = Turn(0, 0, 3, torch.arange(3))
    got = local_gradient(parabolas, w, None, turn.stream("batch"), clip=1.5)
    torch.testing.assert_close(got, gradient.clamp(-1.5, 1.5))
    assert int((got != gradient).sum()) == 2
