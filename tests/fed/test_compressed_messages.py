"""Whole numbers in place of floats in the algorithms' messages: fewer bytes, the same end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from machines import job, run, same, states

from symprune.errors import SympruneError
from symprune.fed.algorithms import ALGORITHMS, build, options_of
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.optimum import minimise
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import simulate
from symprune.fed.wire import parcel

COMPRESSING = sorted(name for name in ALGORITHMS if "compressor" in options_of(ALGORITHMS[name]))


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem("digits", split="class:2", clients=5, l2=0.1)


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", COMPRESSING)
def test_bytes_fall_and_are_those_that_were_sent(
    name: str, bits: str, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    encode = parcel.Parcel.encode

    def counting(self: parcel.Parcel, row: int) -> bytes:
        sent.append(len(data := encode(self, row)))
        return data

    plain = simulate(build(name, compressor="identity"), problem, 3)
    monkeypatch.setattr(parcel.Parcel, "encode", counting)
    short = simulate(build(name, compressor=bits), problem, 3, wire=True, clients_at_once=1)
    last = short.history[-1]
    assert sum(sent) == last["bytes_up"] + last["bytes_down"]
    sparse = plain.history[-1]["bytes_up"] < 0.5 * 4 * problem.dimension * 15  # and places cost
    share = {"int8": 0.30, "int4": 0.17}[bits] + 0.35 * sparse
    assert last["bytes_up"] < share * plain.history[-1]["bytes_up"]
    monkeypatch.undo()
    together = simulate(build(name, compressor=bits), problem, 3)
    assert together.history == short.history
    assert same(together.server, short.server) and same(together.client, short.client)


@pytest.mark.parametrize("compressor", ["int8", "int4", "top-k:0.2+int8", "top-k:0.2+int4"])
def test_error_feedback_reaches_the_optimum_through_rounded_messages(compressor: str) -> None:
    problem = make_problem("breast-cancer", clients=6, l2=0.1, dtype="float64")
    optimum = minimise(problem)
    for name in ("ef-bv", "ef21"):
        result = simulate(build(name, compressor=compressor), problem, 700, optimum=optimum)
        gap = result.series("gap")
        assert gap[-1] < 1e-8 * gap[0], name


def test_diana_needs_what_is_unbiased_and_rounding_is() -> None:
    problem = make_problem("breast-cancer", clients=6, l2=0.1, dtype="float64")
    optimum = minimise(problem)
    gap = simulate(build("diana", compressor="int4"), problem, 700, optimum=optimum).series("gap")
    assert gap[-1] < 1e-8 * gap[0]


@pytest.mark.parametrize("name", ["proxskip", "sparse-proxskip", "sparse-proxskip-local"])
def test_control_variates_sum_to_zero_when_uploads_are_rounded(name: str, problem: Problem) -> None:
    result = simulate(build(name, compressor="int4", p=0.3), problem, 8)
    assert result.history[-1]["h_sum"] < 1e-5


def test_rounded_updates_train_as_well_as_exact_ones(problem: Problem) -> None:
    exact, short = (
        simulate(build("fedavg", p=0.2, compressor=kind), problem, 25).history[-1]
        for kind in ("identity", "int8")
    )
    assert short["loss"] == pytest.approx(exact["loss"], rel=1e-3)


def test_masks_top_k_and_whole_numbers_add_up(problem: Problem) -> None:
    keep = torch.rand(10, 65, generator=torch.Generator().manual_seed(0)) < 0.5
    plans = [{}, {"masks": {"weight": keep}}]
    ef21 = [build("ef21", compressor=f"top-k:0.3{more}") for more in ("", "+int8", "+int4")]
    sizes = [
        simulate(algorithm, problem, 2, **plan).history[-1]["bytes_up"]  # type: ignore[arg-type]
        for plan in plans
        for algorithm in ef21
    ]
    assert sizes[0] > sizes[1] > sizes[2] and sizes[3] > sizes[4] > sizes[5]
    assert all(masked < 0.6 * whole for whole, masked in zip(sizes[:3], sizes[3:], strict=True))


@pytest.mark.parametrize("name", ["fedavg", "ef21", "sparse-proxskip", "ditto"])
def test_letters_with_rounded_values_give_the_bits_and_bytes_of_the_in_process_run(
    name: str, tmp_path: Path
) -> None:
    task = replace(job(name), options={"compressor": "int4"})
    there = run(task, tmp_path)
    here = simulate(task.build_algorithm(), task.whole_problem(), task.rounds, clients_at_once=1)
    assert same(there.server, here.server)
    assert same(there.ledger.state(), here.ledger.state())
    assert same(states(tmp_path, there), here.client)


def test_where_only_rounding_makes_sense_nothing_is_left_out(problem: Problem) -> None:
    with pytest.raises(SympruneError, match=r"can be rounded here .*top-k:0\.1"):
        simulate(build("sparse-proxskip", compressor="top-k:0.1"), problem, 1)
    with pytest.raises(SympruneError, match="Unknown compressor"):
        simulate(build("fedavg", compressor="int3"), problem, 1)
