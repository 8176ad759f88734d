"""What `fed deploy` shows when its run is over. Server and clients are the real ones, called here
one after the other instead of as Flower's processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pretend_device import DEVICE, PretendDevice
from typer.testing import CliRunner, Result

from symprune.errors import Diverged, SympruneError
from symprune.fed.algorithms.baselines.gradient_descent import GD
from symprune.fed.cli import deploy as command
from symprune.fed.cli.main import app
from symprune.fed.remote.client import answer
from symprune.fed.remote.server import serve
from symprune.fed.remote.transport import LocalTransport, Node

if TYPE_CHECKING:
    from symprune.fed.flower.deploy import Deployment

pytest.importorskip("flwr")


class Settled(LocalTransport):
    """Nodes with what the deployment says that their owners have set."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(answer, deployment.job.clients, deployment.folder)
        self.settings = deployment.settings or ({},) * self.clients

    def node(self, number: int) -> Node:
        folder = self.folder / f"client-{number}"
        policy = {"policy": str(self.folder / "policies" / f"node-{number}.yaml")}
        return Node(number, folder, {**policy, **self.settings[number]})


def in_this_process(deployment: Deployment, steps: str) -> None:
    deployment.prepare()
    job: Any = deployment.job
    folder = deployment.folder / "server"
    serve(job, Settled(deployment), folder, pause=0).write(folder, job.whole_problem())


@pytest.fixture(autouse=True)
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "follow", in_this_process)


def deploy(folder: Path, *more: str) -> Result:
    options = ("--data", "breast-cancer", "--rounds", "3", "--folder", str(folder))
    arguments = ["deploy", "--algorithm", "gd", *options, *more]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_a_deployment_ends_with_its_bill_as_a_table_and_a_picture(tmp_path: Path) -> None:
    done = deploy(tmp_path)
    assert done.exit_code == 0, done.exception
    assert "per client and round" in done.output and "Warning" not in done.output
    assert (tmp_path / "server" / "bill.png").stat().st_size > 5000
    history = json.loads((tmp_path / "server" / "history.json").read_text())["history"]
    assert [(record["round"], record["bytes_up"] > 0) for record in history] == [
        *((0, False), (1, True), (2, True), (3, True)),
    ]


def test_a_deployment_whose_loss_ended_above_its_start_says_so(tmp_path: Path) -> None:
    """Also where the first round made it, and those that follow take some of it back."""
    skewed = ("--data", "digits", "--split", "class:2", "--set", "gamma=20")
    done = deploy(tmp_path / "worse", *skewed)
    assert done.exit_code == 0 and "Warning: The loss ended at" in done.output
    done = deploy(tmp_path / "blown", "--set", "gamma=1000")
    assert isinstance(done.exception, Diverged)
    assert "above the 0.6931 of round 0" in str(done.exception)
    assert (tmp_path / "blown" / "server" / "model.safetensors").exists()


def test_a_device_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    done = deploy(tmp_path / "new", "--device", "cuda:77")
    assert isinstance(done.exception, SympruneError)
    assert "Device 'cuda:77' is not available here" in str(done.exception)
    assert not (tmp_path / "new").exists()


def test_nodes_compute_where_they_are_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a pretended device here; it is the owner's setting, not the job's."""
    where: list[str] = []
    step = GD.client_step

    def watched(self: Any, client: Any, received: Any, problem: Any, turn: Any) -> Any:
        where.append(received["x"].device.type)
        return step(self, client, received, problem, turn)

    monkeypatch.setattr(GD, "client_step", watched)
    with PretendDevice():
        done = deploy(tmp_path, "--device", str(DEVICE))
    assert done.exit_code == 0, done.exception
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert asked["settings"] == [{"device": str(DEVICE)}] * 2 and "device" not in asked["job"]
    assert where == [DEVICE.type] * 6
