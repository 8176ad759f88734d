"""Clients of very unlike sizes: computed by size, in stacks or alone, with the same bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.algorithms import ALGORITHMS, build
from symprune.fed.problems.datasets import load
from symprune.fed.problems.losses import Softmax
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.problems.rows import find_buckets, width_for
from symprune.fed.simulate import Result, simulate

SIZES = (2, 37, 5, 131, 40, 38)


@pytest.fixture(scope="module")
def problem() -> Problem:
    digits = load("digits").with_intercept()
    ends = torch.tensor([0, *SIZES]).cumsum(0).tolist()
    parts = [(digits.x[a:b].float(), digits.y[a:b].float()) for a, b in pairwise(ends)]
    own_test = stack_rows([(x[:2], y[:2]) for x, y in parts])
    loss = Softmax(digits.x.shape[1], 10)
    return Problem(loss, stack_rows(parts), 0.1, client_test=own_test, name="uneven")


def same(a: Result, b: Result) -> None:
    assert a.history == b.history
    for one, other in ((a.server, b.server), (a.client, b.client)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_clients_of_all_sizes_get_the_same_bits_together_and_apart(
    name: str, problem: Problem
) -> None:
    together = simulate(build(name), problem, 2)
    same(together, simulate(build(name), problem, 2, clients_at_once=1))
    same(together, simulate(build(name), problem, 2, clients_at_once=4, wire=True))


def test_a_client_is_computed_with_little_padding(problem: Problem) -> None:
    used = torch.arange(1, 3000)
    widths = width_for(used, 3000)
    assert bool((widths >= used).all()) and bool((widths <= used + used // 8).all())
    assert len(widths[used >= 64].unique()) <= 8 * 6
    assert width_for(torch.tensor([130]), 131).tolist() == [131]  # there are no more rows
    sizes = {places: own.weights.shape for places, own in problem.rows.buckets}
    assert sorted(sizes.values()) == [(1, 2), (1, 5), (1, 131), (3, 40)]
    computed = sum(clients * width for clients, width in sizes.values())
    assert computed < sum(SIZES) * 1.05 < len(SIZES) * max(SIZES) / 2


def test_values_and_gradients_are_those_of_the_padded_stack(problem: Problem) -> None:
    exact = replace(problem, rows=problem.rows.to(torch.float64))
    w = torch.randn(6, exact.dimension, generator=torch.Generator().manual_seed(0)).double()
    rows = exact.rows
    padded = exact.loss.gradient(w, rows.x, rows.y, rows.weights) + exact.l2 * w
    torch.testing.assert_close(exact.gradient(w), padded, rtol=1e-12, atol=1e-13)
    value = exact.loss.value(w, rows.x, rows.y, rows.weights)
    torch.testing.assert_close(
        exact.value(w), value + exact.l2 / 2 * w.square().sum(1), rtol=1e-12, atol=0
    )


def test_stacks_of_one_size_are_not_copied() -> None:
    even = make_problem("digits", clients=3)
    rows = even.select(slice(0, 2)).rows[:, :100]
    ((_, own),) = rows.buckets
    assert own.x.data_ptr() == rows.x.data_ptr() and own.x.shape == rows.x.shape
    assert find_buckets(torch.zeros(2, 3)) == []


def test_few_clients_at_work_leave_the_states_of_all_others_where_they_are(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their states are not copied from round to round, and none is written over by mistake."""
    scaffold = build("scaffold", cohort_size=2)
    moved: list[int] = []
    clone = Tensor.clone

    def counting(self: Tensor, *args: object, **options: object) -> Tensor:
        moved.append(self.numel() if len(self) == len(SIZES) else 0)
        return clone(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Tensor, "clone", counting)
    result = simulate(scaffold, problem, 6)
    held = sum(tensor.numel() for tensor in result.client.values())
    assert sum(moved) <= held  # once, in the first round
    one = simulate(scaffold, problem, 6, clients_at_once=1)
    assert all(torch.equal(result.client[key], one.client[key]) for key in one.client)


def test_fields_of_a_state_that_begin_as_one_tensor_part(problem: Problem) -> None:
    """Before its second round a client of ProxSkip has sent something, and corrects nothing yet."""
    result = simulate(build("proxskip", cohort_size=2), problem, 1)
    assert int(result.client["sent"].any(1).sum()) == 2 and not bool(result.client["h"].any())


@pytest.mark.parametrize("wanted", [None, True, False])
def test_the_gradient_norm_is_measured_where_it_is_cheap_or_asked_for(wanted: bool | None) -> None:
    convex = make_problem("digits", clients=2)
    network = make_problem("digits", "mlp:4", clients=2)
    fedavg = build("fedavg", gamma=0.1)
    for problem, cheap in ((convex, True), (network, False)):
        result = simulate(fedavg, problem, 1, gradient_norm=wanted)
        if cheap if wanted is None else wanted:
            norm = problem.mean_gradient(result.model).norm()
            assert result.series("gradient_norm")[-1] == float(norm)
        else:
            with pytest.raises(SympruneError, match="no metric 'gradient_norm'; it has round, lo"):
                result.series("gradient_norm")


def test_asking_for_the_smoothness_leaves_the_rows_as_they_are() -> None:
    problem = make_problem("breast-cancer", clients=3, dtype="float64")
    before = problem.rows.x.clone()
    problem.constants()
    assert torch.equal(problem.rows.x, before)
