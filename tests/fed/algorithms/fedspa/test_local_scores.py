"""Pruning criteria on clients: scores come from each client's own activations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from symprune import criteria
from symprune.errors import SympruneError
from symprune.fed import build, simulate
from symprune.fed.algorithms.fedspa.local_scores import (
    activation_norms,
    calibration_rows,
    weight_scores,
)
from symprune.fed.algorithms.shared.layer_masks import best_mask, layer_ones
from symprune.fed.problems.losses import Module
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.networks import network
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.randomness import Stream


def stream(clients: int) -> Stream:
    return Stream.of(0, 0, "test", torch.arange(clients))


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem("digits", "mlp:12", "class:2", clients=4)


def rated(name: str, problem: Problem, w: Tensor | None = None) -> Tensor:
    point = problem.initial(0) if w is None else w
    n = problem.clients
    return weight_scores(name, problem, point.expand(n, -1), problem.rows, stream(n))


@pytest.mark.parametrize("name", sorted(set(criteria.available()) - {"wanda-plus-plus"}))
def test_every_criterion_of_the_pruning_engine_rates_every_clients_weights(
    name: str, problem: Problem
) -> None:
    score = rated(name, problem)
    assert score.shape == (4, problem.dimension)
    first, bias = (problem.layout.slices()[n] for n in ("1.weight", "1.bias"))
    assert bool(torch.isfinite(score).all()) and bool((score[:, first] > 0).any())
    assert bool((score[:, bias] == 0).all())


def test_a_criterion_that_needs_gradients_of_blocks_is_refused(problem: Problem) -> None:
    with pytest.raises(SympruneError, match="wanda-plus-plus needs the gradients"):
        rated("wanda-plus-plus", problem)
    with pytest.raises(SympruneError, match="wanda-plus-plus needs the gradients"):
        simulate(build("fedspa", mask_score="wanda-plus-plus"), problem, rounds=1)


def test_wanda_is_weight_times_the_norm_of_the_clients_inputs(problem: Problem) -> None:
    score = problem.layout.split(rated("wanda", problem))
    weights = problem.layout.split(problem.initial(0))
    for client in range(4):
        own = problem.rows.weights[client] != 0
        x = problem.rows.x[client][own]
        expected = weights["1.weight"].abs() * x.square().mean(0).sqrt()
        assert torch.allclose(score["1.weight"][client], expected, atol=1e-6)
        hidden = (x @ weights["1.weight"].T + weights["1.bias"]).relu()
        expected = weights["3.weight"].abs() * hidden.square().mean(0).sqrt()
        assert torch.allclose(score["3.weight"][client], expected, atol=1e-6)


def test_criteria_on_weights_alone_give_all_clients_the_same_mask(problem: Problem) -> None:
    ones = layer_ones(problem.layout, 0.3, "uniform")
    sizes = tuple(problem.layout.sizes)
    alone, local = (best_mask(rated(n, problem), sizes, ones) for n in ("magnitude", "wanda"))
    assert torch.equal(alone[0], alone[1])
    assert not torch.equal(local[0], local[1])
    assert alone.sum(1).tolist() == local.sum(1).tolist() == [sum(ones)] * 4


def test_a_client_drops_the_weights_of_inputs_it_never_sees() -> None:
    x = torch.rand(2, 30, 6, generator=torch.Generator().manual_seed(0))
    x[0, :, :3], x[1, :, 3:] = 0, 0
    y = torch.arange(30.0).remainder(3)
    loss = Module(lambda: nn.Sequential(nn.Linear(6, 3)))
    problem = Problem(loss, stack_rows([(rows, y) for rows in x]))
    mask = best_mask(rated("ria", problem), (18, 3), (9, 3))[:, :18].view(2, 3, 6)
    assert not mask[0, :, :3].any() and not mask[1, :, 3:].any()


def test_a_convolution_is_a_matrix_on_patches() -> None:
    module = network("lenet5")((784,), 10)
    x = torch.rand(3, 784, generator=torch.Generator().manual_seed(0))
    problem = Problem(Module(lambda: module), stack_rows([(x, torch.zeros(3))]))
    w = problem.initial(0)
    norms = activation_norms(problem, w, x)
    conv = problem.layout.split(w)["1.weight"]
    output = nn.functional.conv2d(x.view(3, 1, 28, 28), conv, problem.layout.split(w)["1.bias"])
    assert norms["1.weight"][0].shape == (25,)
    expected = output.square().sum((2, 3)).mean(0).sqrt()
    assert torch.allclose(norms["1.weight"][1], expected, rtol=1e-4)
    corner = x.view(3, 28, 28)[:, :24, :24].square().sum((1, 2)).mean().sqrt()
    assert float(norms["1.weight"][0][0]) == pytest.approx(float(corner), rel=1e-4)
    assert weight_scores("wanda", problem, w.unsqueeze(0), problem.rows, stream(1)).shape[1] == len(
        w
    )


def test_linear_models_have_activations_too() -> None:
    for data in ("digits", "breast-cancer"):
        problem = make_problem(data, clients=3)
        w = torch.ones(problem.dimension)
        score = rated("wanda", problem, w)
        x = problem.rows.x[0][problem.rows.weights[0] != 0]
        assert torch.allclose(score[0][: x.shape[1]], x.square().mean(0).sqrt(), atol=1e-6)


def test_calibration_uses_different_rows_and_no_padding(problem: Problem) -> None:
    rows = calibration_rows(problem, stream(4), 50)
    assert (rows.weights != 0).sum(1).tolist() == [50] * 4
    assert len(rows.x[0].unique(dim=0)) > 45


def test_a_weight_without_activations_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.table

    problem = Problem(Module(Odd), stack_rows([(torch.rand(5, 4), torch.zeros(5))]))
    assert rated("magnitude", problem).shape == (1, 12)
    with pytest.raises(SympruneError, match=r"wanda.*table"):
        rated("wanda", problem)
