"""What a run holds between two rounds: linear in the number of clients, few models for each."""

from __future__ import annotations

import pytest

from symprune.fed.algorithms import ALGORITHMS, build
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import Result, simulate

FEW, MANY = 3, 6
MOST = 3  # models a client: its own, its optimum and a control variate, Scafflix's
NEIGHBOURS = {"similarity-network": 0.5}  # values on the edges of a graph of clients


@pytest.fixture(scope="module")
def federations() -> dict[int, Problem]:
    return {n: make_problem("digits", clients=n, l2=0.1) for n in (FEW, MANY)}


def held(result: Result) -> int:
    """Bytes of both sides' states and of the ledger."""
    states = (result.server, result.client, result.ledger.state())
    return sum(t.numel() * t.element_size() for state in states for t in state.values())


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_another_client_takes_the_memory_of_a_few_models(
    name: str, federations: dict[int, Problem]
) -> None:
    few, many = (
        held(simulate(build(name), problem, 1, evaluate_every=0))
        for problem in federations.values()
    )
    size = 4 * federations[FEW].dimension
    ledger = 100  # bytes: counts of a client
    assert many - few <= (MANY - FEW) * ((MOST + NEIGHBOURS.get(name, 0)) * size + ledger)
