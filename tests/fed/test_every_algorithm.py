"""What every registered algorithm must do, whoever wrote it: same bits in any arrangement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from symprune.errors import Diverged, SympruneError
from symprune.fed.algorithms import ALGORITHMS, build
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.randomness import Stream
from symprune.fed.simulate import Result, simulate

ROUNDS = 4
INDIFFERENT = ("similarity-network",)  # of five clients all are neighbours, whatever is drawn


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem("digits", split="class:2", clients=5, l2=0.1, client_test_share=0.2)


def same(a: Result, b: Result) -> None:
    assert a.history == b.history
    assert a.server.keys() == b.server.keys() and a.client.keys() == b.client.keys()
    assert all(torch.equal(a.server[k], b.server[k]) for k in a.server)
    assert all(torch.equal(a.client[k], b.client[k]) for k in a.client)
    assert torch.equal(a.ledger.up_bytes, b.ledger.up_bytes)
    assert torch.equal(a.ledger.down_bytes, b.ledger.down_bytes)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_clients_one_by_one_with_encoded_messages_give_the_same_bits(
    name: str, problem: Problem
) -> None:
    together = simulate(build(name), problem, ROUNDS)
    apart = simulate(build(name), problem, ROUNDS, clients_at_once=1, wire=True)
    same(together, apart)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_run_resumed_from_its_checkpoint_ends_with_the_same_bits(
    name: str, problem: Problem, tmp_path: Path
) -> None:
    file = tmp_path / "run.safetensors"
    whole = simulate(build(name), problem, ROUNDS)
    simulate(build(name), problem, ROUNDS // 2, checkpoint=file)
    same(whole, simulate(build(name), problem, ROUNDS, checkpoint=file))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_ledger_counts_the_bytes_of_the_encoded_messages(
    name: str, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    from symprune.fed.wire import parcel

    encode = parcel.Parcel.encode

    def counting(self: parcel.Parcel, row: int) -> bytes:
        data = encode(self, row)
        sent.append(len(data))
        return data

    monkeypatch.setattr(parcel.Parcel, "encode", counting)
    result = simulate(build(name), problem, ROUNDS, wire=True)
    assert sum(sent) == result.history[-1]["bytes_up"] + result.history[-1]["bytes_down"]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_same_seed_repeats_a_run_and_another_changes_what_is_drawn(
    name: str, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws: list[tuple[int, ...]] = []
    bits = Stream.bits

    def counting(self: Stream, *shape: int) -> np.ndarray:
        draws.append(shape)
        return bits(self, *shape)

    monkeypatch.setattr(Stream, "bits", counting)
    x0 = problem.initial(0)
    first, again, other = (
        simulate(build(name), problem, ROUNDS, seed=seed, x0=x0) for seed in (1, 1, 2)
    )
    same(first, again)
    states = [(first.server, other.server), (first.client, other.client)]
    alike = all(torch.equal(a[key], b[key]) for a, b in states for key in a)
    assert alike == (not draws or name in INDIFFERENT)
    for run in (first, other):
        assert float(run.history[-1]["loss"]) < 10 * float(run.history[0]["loss"])


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_prepared_algorithm_survives_the_way_to_a_client_as_json(
    name: str, problem: Problem
) -> None:
    prepared = build(name).prepare(problem.constants())
    there = build(name, **json.loads(json.dumps(prepared.settings())))
    assert there.located(problem.layout) == prepared


def test_a_checkpoint_of_another_run_is_refused(problem: Problem, tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    simulate(build("gd"), problem, 1, checkpoint=file)
    with pytest.raises(SympruneError, match="another run"):
        simulate(build("gd"), problem, 2, seed=1, checkpoint=file)
    with pytest.raises(SympruneError, match="another run"):
        simulate(build("gd"), replace(problem, l2=0.2), 2, checkpoint=file)
    file.write_bytes(b"nonsense")
    with pytest.raises(SympruneError, match="cannot be read"):
        simulate(build("gd"), problem, 2, checkpoint=file)


def test_a_run_that_is_not_evaluated_counts_bytes_and_ends_with_the_same_model(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = simulate(build("fedavg", p=0.5), problem, ROUNDS)

    def refuse(*_: object) -> float:
        raise AssertionError("a loss was measured")

    monkeypatch.setattr(Problem, "mean_value", refuse)
    silent = simulate(build("fedavg", p=0.5), problem, ROUNDS, evaluate_every=0)
    assert torch.equal(silent.model, measured.model)
    start, end = silent.history
    assert start == {"round": 0, **dict.fromkeys(measured.ledger.totals(), 0)}
    assert end == {"round": ROUNDS, **measured.ledger.totals()}
    for wrong in ({"evaluate_every": -1}, {"checkpoint_every": 0}):
        with pytest.raises(SympruneError, match=next(iter(wrong))):
            simulate(build("gd"), problem, 1, **wrong)


def test_a_step_that_diverges_is_stopped_and_named(problem: Problem) -> None:
    with pytest.raises(Diverged, match=r"gd.*smaller step size"):
        simulate(build("gd", gamma=1e30), problem, 50)


def test_unknown_names_and_options_are_named() -> None:
    with pytest.raises(SympruneError, match="fedmagic"):
        build("fedmagic")
    with pytest.raises(SympruneError, match="momentum"):
        build("gd", momentum=0.9)
