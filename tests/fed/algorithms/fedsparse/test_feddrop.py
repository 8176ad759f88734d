"""Federated dropout: sub-networks are real networks, and only they travel."""

from __future__ import annotations

import pytest
import torch

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.algorithms.fedsparse.feddrop import remaining_weights
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Turn
from symprune.fed.simulate import simulate

LENET = ((20, 1, 5, 5), (20,), (50, 20, 5, 5), (50,), (500, 800), (500,), (10, 500), (10,))


@pytest.fixture(scope="module")
def digits() -> Problem:
    return make_problem("digits", model="mlp:12-8", clients=4, l2=0.0)


def test_a_masked_network_predicts_what_the_smaller_network_does(digits: Problem) -> None:
    keep = [torch.arange(12) % 3 > 0, torch.arange(8) % 2 > 0]
    w = torch.randn(1, digits.dimension, generator=torch.Generator().manual_seed(0))
    mask = remaining_weights(digits.layout.shapes, [units.unsqueeze(0) for units in keep])
    first, b1, second, b2, last, b3 = digits.layout.split(w[0]).values()
    x = digits.rows.x[0]
    hidden = torch.relu(x @ first[keep[0]].T + b1[keep[0]])
    hidden = torch.relu(hidden @ second[keep[1]][:, keep[0]].T + b2[keep[1]])
    small = (hidden @ last[:, keep[1]].T + b3).argmax(1)
    assert torch.equal(digits.loss.predict(w * mask, digits.rows.x[:1])[0], small.to(x.dtype))


def test_a_feature_map_takes_its_block_of_flattened_inputs_along() -> None:
    units = [torch.ones(1, 20).bool(), torch.ones(1, 50).bool(), torch.ones(1, 500).bool()]
    units[1][0, 3] = False
    gone = (~remaining_weights(LENET, units)).view(-1)
    assert int(gone.sum()) == 20 * 25 + 1 + 500 * 16


def test_without_dropping_it_is_fedopt_to_the_bit(digits: Problem) -> None:
    plain = simulate(build("fedopt"), digits, 3)
    none = simulate(build("feddrop", rate=0.0), digits, 3)
    assert torch.equal(plain.model, none.model)


def test_only_the_sub_network_travels_and_clients_have_different_ones(digits: Problem) -> None:
    result = simulate(build("feddrop", rate=0.5), digits, 1)
    weights = 64 * 6 + 6 + 6 * 4 + 4 + 4 * 10 + 10
    assert result.history[-1]["paper_bits_up"] == 32 * weights
    assert result.history[-1]["paper_bits_down"] == 32 * weights
    used = result.client["w"] != 0
    assert bool((used[0] != used[1]).any())


def test_weights_in_nobodys_sub_network_stay(digits: Problem) -> None:
    algorithm = build("feddrop", rate=0.8, cohort_size=1, server_optimizer="sgd")
    result = simulate(algorithm, digits, 1)
    turn = Turn(0, 0, 4, result.algorithm.cohort(result.server, Turn(0, 0, 4, torch.arange(4))))
    mask = result.algorithm.mask(turn)[0]  # type: ignore[attr-defined]
    start = digits.initial(0)
    assert torch.equal(result.model[~mask], start[~mask])
    assert not torch.equal(result.model[mask], start[mask])


def test_a_rate_that_drops_everything_and_a_branching_network_are_refused(
    digits: Problem,
) -> None:
    with pytest.raises(SympruneError, match="rate = 1"):
        simulate(build("feddrop", rate=1.0), digits, 1)
    with pytest.raises(SympruneError, match="follow each other"):
        remaining_weights(((4, 3), (5, 6)), [torch.ones(1, 4).bool()])
