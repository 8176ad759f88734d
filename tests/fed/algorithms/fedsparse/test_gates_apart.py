"""How far clients' gates are from the server's (FedSparse, appendix C, Fig. 5)."""

from __future__ import annotations

import pytest
import torch

from symprune.fed.algorithms import build
from symprune.fed.algorithms.fedsparse.gates import total_variation
from symprune.fed.problems.make import make_problem
from symprune.fed.simulate import simulate


def test_the_distance_is_the_mean_and_the_largest_difference_of_living_gates() -> None:
    chance = torch.tensor([[0.9, 0.5, 0.0], [0.1, 0.2, 1.0]])
    prior = torch.tensor([[0.5, 0.4, 1.0], [0.1, 0.2, 0.0]])
    apart = total_variation(chance, prior, torch.tensor([True, True, False]))
    torch.testing.assert_close(apart, torch.tensor([[0.25, 0.4], [0.0, 0.0]]))
    assert total_variation(chance, prior, torch.zeros(3, dtype=torch.bool)).tolist() == [[0, 0]] * 2


@pytest.mark.parametrize("name", ["fedsparse", "fedsparse-em", "fedsparse-scaffold"])
def test_gates_that_do_not_move_are_where_the_servers_are(name: str) -> None:
    problem = make_problem("digits", "mlp:8", clients=4, l2=0.0)
    options = {"exempt": ("output",), "cohort_size": 2, "lr": 1e-9}
    still = simulate(build(name, gate_lr=0.0, **options), problem, 2).history
    assert [record["gates_apart_most"] for record in still] == pytest.approx([0, 0, 0], abs=1e-4)
    moved = simulate(build(name, gate_lr=0.1, **options), problem, 2).history[-1]
    assert 0 < moved["gates_apart"] <= moved["gates_apart_most"] <= 1
