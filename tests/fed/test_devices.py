"""Runs on an accelerator, by the same code: a pretend one fails where CUDA would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pretend_device import DEVICE, OnDevice, PretendDevice

from symprune.fed.algorithms import ALGORITHMS, build
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import Result, simulate


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem("digits", split="class:2", clients=5, l2=0.1, client_test_share=0.2)


@pytest.fixture
def device() -> Iterator[PretendDevice]:
    with PretendDevice() as pretended:
        yield pretended


def alike(here: Result, there: Result) -> None:
    """Products are made by another library there, so figures agree up to rounding. What cancels
    exactly in one of them may leave a rest in the other, and zeros are not sent."""
    assert isinstance(there.model, OnDevice)
    first, second = here.history[-1], there.history[-1]
    assert first.keys() == second.keys()
    assert first["bytes_up"] == pytest.approx(second["bytes_up"], rel=5e-3)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-3)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_lives_where_its_problem_is(
    name: str, problem: Problem, device: PretendDevice
) -> None:
    there = simulate(build(name), problem.to(DEVICE), 2)
    alike(simulate(build(name), problem, 2), there)


@pytest.mark.parametrize("model", ["mlp:8", "lenet5"])
def test_networks_of_both_kinds_train_there(model: str, device: PretendDevice) -> None:
    problem = make_problem("digits", model, clients=3)
    fedavg = build("fedavg", gamma=0.1, batch=4, cohort_size=2)
    there = simulate(fedavg, problem.to(DEVICE), 2, evaluate_every=2)
    alike(simulate(fedavg, problem, 2, evaluate_every=2), there)


def test_masks_messages_and_checkpoints_come_and_go(
    problem: Problem, device: PretendDevice, tmp_path: Path
) -> None:
    keep = torch.rand(10, 65, generator=torch.Generator().manual_seed(0)) < 0.5
    masked = problem.masked({"weight": keep})
    ef21, file = build("ef21", compressor="top-k:0.1"), tmp_path / "run.safetensors"
    here = simulate(ef21, masked, 4)
    simulate(ef21, masked.to(DEVICE), 2, checkpoint=file)
    there = simulate(ef21, masked.to(DEVICE), 4, checkpoint=file, wire=True, clients_at_once=2)
    alike(here, there)
    assert bool((there.model.cpu().view(10, 65)[~keep] == 0).all())
    assert all(isinstance(tensor, OnDevice) for tensor in there.client.values())
