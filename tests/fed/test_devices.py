"""Runs on an accelerator, by the same code: a pretend one fails where CUDA would."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from machines import Network, job
from pretend_device import DEVICE, OnDevice, PretendDevice
from typer.testing import CliRunner

from symprune.errors import SympruneError
from symprune.fed.algorithms import ALGORITHMS, build
from symprune.fed.cli.main import app
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.remote.server import serve
from symprune.fed.remote.transport import Node
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


class Accelerated(Network):
    """Nodes whose owners have set where they compute."""

    def node(self, number: int) -> Node:
        return Node(number, self.folder / f"client-{number}", {"device": str(DEVICE)})


# States that are kept, given back, or masked; replies of any length; a message that is rounded.
@pytest.mark.parametrize("name", ["sparse-proxskip", "scafflix", "fedspa", "fedp3", "ef21"])
def test_clients_on_machines_of_their_own_compute_where_their_owners_say(
    name: str, device: PretendDevice, tmp_path: Path
) -> None:
    task = job(name, 3)
    nodes = Accelerated(tmp_path / "clients", before=lambda number, client: _lose(tmp_path, number))
    there = serve(task, nodes, tmp_path / "server", pause=0)
    here = simulate(task.build_algorithm(), task.whole_problem(), 3, clients_at_once=1)
    assert not isinstance(there.model, OnDevice)  # the server is another machine
    assert there.history[-1]["loss"] == pytest.approx(here.history[-1]["loss"], rel=1e-3)
    assert there.history[-1]["bytes_up"] == pytest.approx(here.history[-1]["bytes_up"], rel=5e-3)
    computed = [line for line in device.uploads if "devices.placed" in line]
    assert computed, "no broadcast was brought to the device"


def _lose(folder: Path, number: int) -> bool:
    """Before the last exchange the disk of a client is emptied; the server helps."""
    if number == 2:
        shutil.rmtree(folder / "clients" / "client-1", ignore_errors=True)
    return True


def test_a_private_client_hides_on_the_host_what_it_computed_elsewhere(
    device: PretendDevice, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    promised = {"clip": 1.0, "multiplier": 1e-6, "rate": 1.0, "honest": 1, "delta": 1e-5}
    task = replace(job("fedavg", p=0.5), robust="none", private=promised)
    there = serve(task, Accelerated(tmp_path / "clients"), tmp_path / "server", pause=0)
    plain = job("fedavg", p=0.5)
    here = simulate(plain.build_algorithm(), plain.whole_problem(), 2)
    assert torch.allclose(there.model, here.model, atol=1e-3)


def test_whole_numbers_in_messages_are_made_into_bytes_on_the_host(
    problem: Problem, device: PretendDevice
) -> None:
    ef21 = build("ef21", compressor="top-k:0.2+int4")
    alike(simulate(ef21, problem, 2), simulate(ef21, problem.to(DEVICE), 2, wire=True))


def test_a_comparison_runs_on_a_device(device: PretendDevice, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "problem: {data: breast-cancer, clients: 2}\nrounds: 2\nmetric: gap\nalgorithms: [gd]\n"
    )
    for place in ("cpu", str(DEVICE)):
        command = ["compare", str(plan), "--output", str(tmp_path / place), "--device", place]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.exception
    assert device.waits, "nothing was computed there"
    here, there = (
        json.loads((tmp_path / place / "summary.json").read_text())[0]["gap"]
        for place in ("cpu", str(DEVICE))
    )
    assert there == pytest.approx(here, rel=1e-3)
    done = CliRunner().invoke(app, [*command[:-1], "cuda:77"])
    assert isinstance(done.exception, SympruneError) and "'cuda:77'" in str(done.exception)
