"""What the first turns of a run tell of the others, and that asking changes nothing."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from symprune.fed.algorithms import choose
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import Pace, Result, simulate


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem("digits", None, "iid", clients=4)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns are counted, however busy the machine is."""
    monkeypatch.setattr(import_module("symprune.fed.simulate"), "PATIENCE", math.inf)


def run(problem: Problem, rounds: int = 9, **options: Any) -> Result:
    return simulate(choose("fedavg", gamma=0.1), problem, rounds, **options)


def test_it_is_told_once_what_is_left_and_the_bits_are_the_same(problem: Problem) -> None:
    told: list[Pace] = []

    def listen(pace: Pace) -> bool:
        told.append(pace)
        return True

    foreseen = run(problem, evaluate_every=2, foresee=listen)
    (pace,) = told
    assert (pace.turns, pace.evaluations) == (6, 3)
    assert pace.turn > 0 and pace.evaluation > 0
    assert pace.left == pytest.approx(6 * pace.turn + 3 * pace.evaluation)
    plain = run(problem, evaluate_every=2)
    assert torch.equal(foreseen.model, plain.model) and foreseen.history == plain.history


def test_who_only_asks_gets_three_turns_and_no_file(problem: Problem, tmp_path: Path) -> None:
    ended = run(problem, checkpoint=tmp_path / "state", checkpoint_every=5, foresee=lambda _: False)
    assert [record["round"] for record in ended.history] == [0, 1, 2]
    assert not (tmp_path / "state").exists()


def test_a_run_shorter_than_that_is_told_of_at_its_end(problem: Problem) -> None:
    told: list[Pace] = []
    run(problem, 2, foresee=lambda pace: told.append(pace) is None)
    assert [(pace.turns, pace.left) for pace in told] == [(0, 0.0)]


def test_of_a_run_that_goes_on_the_rest_is_told(problem: Problem, tmp_path: Path) -> None:
    told: list[Pace] = []
    run(problem, 4, checkpoint=tmp_path / "state")
    again = run(problem, checkpoint=tmp_path / "state", foresee=lambda p: told.append(p) is None)
    assert told[0].turns == 2 and told[0].evaluation > 0
    assert again.history == run(problem).history
