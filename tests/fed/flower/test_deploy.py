"""A deployment on loopback: what is written, and, slowly, the processes themselves."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from machines import same

from symprune.errors import SympruneError
from symprune.fed import snapshot
from symprune.fed.remote.job import TrainingJob
from symprune.fed.remote.records import client_state
from symprune.fed.simulate import simulate
from symprune.recipe import Recipe

if TYPE_CHECKING:
    from symprune.fed.flower.deploy import Deployment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="Flower is not installed"
)
PROBLEM = {"data": "digits", "split": "class:2", "clients": 2, "l2": 0.1}
TASK = TrainingJob("sparse-proxskip", {"sparsity": 0.5, "p": 0.2}, PROBLEM, rounds=4)
PATIENCE = 1800.0  # seconds; on a machine with much other work a message takes minutes


@pytest.fixture
def ports() -> tuple[int, int]:
    """A free port, and one with free ones behind it, as far as one can know."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], min(two.getsockname()[1], 65_000)


def make(folder: Path, ports: tuple[int, int], task: TrainingJob = TASK) -> Deployment:
    from symprune.fed.flower.deploy import Deployment

    return Deployment(folder, task, *ports, timeout=PATIENCE)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.5)


def test_an_app_folder_has_no_dependencies_and_says_what_to_run(
    tmp_path: Path, ports: tuple[int, int]
) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib comes with Python 3.11")
    import tomllib

    from symprune.fed.remote.job import job_from_json

    make(tmp_path, ports).prepare()
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    config = project["tool"]["flwr"]["app"]["config"]
    assert job_from_json(config["job"]) == TASK and config["clients"] == 2
    home = tomllib.loads((tmp_path / "flower" / "config.toml").read_text())
    assert home["superlink"]["symprune"]["address"].startswith("127.0.0.1:")
    assert not (tmp_path / "flower").is_relative_to(tmp_path / "app")


def test_private_keys_are_private_and_the_certificate_is_the_authoritys(
    tmp_path: Path, ports: tuple[int, int]
) -> None:
    from cryptography import x509

    make(tmp_path, ports).prepare()
    keys = tmp_path / "keys"
    assert keys.stat().st_mode & 0o777 == 0o700
    secrets = sorted(file.name for file in keys.glob("*.key"))
    assert secrets == ["ca.key", "node-0.key", "node-1.key", "superlink.key"]
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in keys.glob("*.key"))
    root, leaf = (
        x509.load_pem_x509_certificate((keys / name).read_bytes())
        for name in ("ca.crt", "superlink.crt")
    )
    leaf.verify_directly_issued_by(root)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    before = (keys / "node-0.key").read_bytes()
    make(tmp_path, ports).prepare()
    assert (keys / "node-0.key").read_bytes() == before


def test_the_command_prepares_a_folder_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from symprune.fed.cli.main import app

    command = ["deploy", "--algorithm", "fedavg", "--folder", str(tmp_path), "--only-prepare"]
    done = CliRunner().invoke(app, [*command, "--set", "p=0.5", "--clients", "3"])
    assert done.exit_code == 0 and (tmp_path / "keys" / "node-2.pub").exists()
    for extra, culprit in ((["--set", "colour=3"], "colour"), (["--own-data", "a"], "1 data sets")):
        refused = CliRunner().invoke(app, [*command, *extra])
        assert isinstance(refused.exception, SympruneError) and culprit in str(refused.exception)


def test_nothing_calls_home_unless_asked(tmp_path: Path, ports: tuple[int, int]) -> None:
    environment = make(tmp_path, ports)._environment()
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert environment["FLWR_HOME"] == str(tmp_path.resolve() / "flower")
    asked = make(tmp_path, ports)
    asked.telemetry = True
    environment = asked._environment()  # whatever this process has set for itself
    assert environment["FLWR_TELEMETRY_ENABLED"] == "1"
    assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "0"


def test_a_superlink_elsewhere_is_named_in_its_certificate_and_by_its_clients(
    tmp_path: Path, ports: tuple[int, int]
) -> None:
    from symprune.fed.flower.deploy import Deployment
    from symprune.fed.flower.keys import _hosts

    Deployment(tmp_path, TASK, *ports, host="link.example.org").prepare()
    names = {"link.example.org", "127.0.0.1", "localhost"}
    assert _hosts(tmp_path / "keys" / "superlink.crt") == names
    home = (tmp_path / "flower" / "config.toml").read_text()
    assert f'address = "link.example.org:{ports[0]}"' in home
    with pytest.raises(SympruneError, match=r"superlink\.crt is not for other\.example\.org"):
        Deployment(tmp_path, TASK, *ports, host="other.example.org").prepare()


@pytest.mark.parametrize("kind", ["training", "pruning"])
def test_the_app_that_is_written_can_be_loaded(
    kind: str, tmp_path: Path, ports: tuple[int, int]
) -> None:
    from symprune.fed.flower.deploy import Deployment
    from symprune.fed.pruning.remote import Task

    recipe = Recipe(pattern="2:4", calibration="federated")
    work = TASK if kind == "training" else Task("any", recipe, 2)
    Deployment(tmp_path, work, *ports).prepare()
    spec = importlib.util.spec_from_file_location("app", tmp_path / "app" / "symprune_app.py")
    assert spec is not None and spec.loader is not None
    app = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(app)
    assert f'resident("{work.client_module}")' in (tmp_path / "app" / "symprune_app.py").read_text()
    assert callable(importlib.import_module(work.client_module).answer)
    assert (type(app.server).__name__, type(app.client).__name__) == ("ServerApp", "ClientApp")


def test_a_run_that_has_begun_is_not_taken_for_another(
    tmp_path: Path, ports: tuple[int, int]
) -> None:
    other = TrainingJob(TASK.algorithm, {"sparsity": 0.9}, PROBLEM, rounds=4)
    make(tmp_path, ports).prepare()
    make(tmp_path, ports, other).prepare()  # nothing has begun
    (tmp_path / "server" / "run.json").write_text("{}")
    make(tmp_path, ports, TrainingJob(other.algorithm, other.options, PROBLEM, rounds=9)).prepare()
    with pytest.raises(SympruneError, match="holds another run"):
        make(tmp_path, ports).prepare()


def test_stopping_ends_what_lingers_and_nothing_else(
    tmp_path: Path, ports: tuple[int, int]
) -> None:
    deployment, other = make(tmp_path, ports), make(tmp_path, ports)
    wait = [sys.executable, "-c", "import time; time.sleep(600)"]
    started = [
        subprocess.Popen(wait, env=each._environment(), start_new_session=True)
        for each in (deployment, other)
    ]
    deployment.stop()
    assert [process.poll() is None for process in started] == [False, True]
    other.stop()
    assert started[1].poll() is not None


def test_a_port_that_is_taken_is_named(tmp_path: Path, ports: tuple[int, int]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", ports[0]))
        other.listen()
        deployment = make(tmp_path, ports)
        deployment.prepare()
        with pytest.raises(SympruneError, match=f"Port {ports[0]}"):
            deployment.start_superlink()


def test_a_node_whose_id_was_lost_in_a_crash_is_found_again(
    tmp_path: Path, ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = make(tmp_path, ports)
    deployment.prepare()
    (tmp_path / "nodes.json").write_text("[70]")
    known = {70, 71}

    def flwr(*arguments: str) -> str:
        if arguments[:2] == ("supernode", "register"):
            return "Public key already in use"
        return " ".join(f'"node-id": "{node}"' for node in sorted(known))

    monkeypatch.setattr(deployment, "flwr", flwr)
    assert deployment.register() == [70, 71]
    (tmp_path / "nodes.json").write_text("[70]")
    known.add(72)
    with pytest.raises(SympruneError, match="Node 1 was not registered: Public key"):
        deployment.register()


def test_a_run_that_flower_has_given_up_is_not_waited_for(
    tmp_path: Path, ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = make(tmp_path, ports)
    deployment.prepare()
    statuses = iter(["running", "finished:failed", "finished:completed"])
    monkeypatch.setattr(deployment, "flwr", lambda *_: f'{{"status": "{next(statuses)}"}}')
    deployment.check_alive("7")
    with pytest.raises(SympruneError, match="Run 7 is finished:failed and left no result"):
        deployment.check_alive("7")
    deployment.result.write_text("{}")
    deployment.check_alive("7")


def test_a_node_that_is_refused_tries_again_and_a_stranger_is_named(
    tmp_path: Path, ports: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a crash, until the SuperLink has missed the old process's heartbeats."""
    from symprune.fed.flower import deploy

    deployment = make(tmp_path, ports)
    deployment.prepare()
    node = tmp_path / "node.sh"
    node.write_text(
        'echo try >> tries; [ $(wc -l < tries) = 3 ] && echo "SuperNode ID: 7" && exec sleep 600\n'
        "echo refused; exit 49\n"
    )
    monkeypatch.setattr(deploy, "_program", lambda name: "/bin/sh")
    monkeypatch.setattr(deploy, "RETRY", 0.0)
    command = deployment._start
    monkeypatch.setattr(deployment, "_start", lambda *about: command(*about[:3], ["sh", str(node)]))
    with pytest.raises(SympruneError, match="refused node 0"):
        deployment.start_node(0, patience=0)
    assert not deployment.processes
    deployment.start_node(0)
    assert (tmp_path / "tries").read_text() == "try\n" * 3
    assert deployment.processes["node-0"].poll() is None
    deployment.stop()


def check_the_bits(folder: Path, task: TrainingJob) -> None:
    here = simulate(task.build_algorithm(), task.whole_problem(), task.rounds, clients_at_once=1)
    there = snapshot.load(folder / "server" / "state.safetensors")
    assert same(there.server, here.server)
    for name, total in here.ledger.state().items():
        assert torch.equal(there.ledger[name], total)
    for number in range(task.clients):
        counted = int(there.client["counted"][number])
        state = client_state(folder / f"client-{number}", there.run, counted)
        assert same(state, {k: v[number : number + 1] for k, v in here.client.items()})


@pytest.mark.slow
def test_a_deployment_gives_the_bits_of_the_in_process_run_and_refuses_strangers(
    tmp_path: Path, ports: tuple[int, int]
) -> None:
    from symprune.fed.flower.deploy import running
    from symprune.fed.flower.keys import make_keys

    make_keys(tmp_path / "strangers", ("127.0.0.1",), 1)
    with running(make(tmp_path, ports)) as deployment:
        with pytest.raises(SympruneError, match="refused node 2"):  # a key nobody knows
            deployment.start_node(2, tmp_path / "strangers" / "node-0.key", patience=0)
        deployment.submit()
        until(deployment.finished)
    check_the_bits(tmp_path, TASK)
    assert not (tmp_path / "client-2").exists()


@pytest.mark.slow
def test_after_kill_9_of_the_superlink_the_run_ends_where_an_undisturbed_run_ends(
    tmp_path: Path, ports: tuple[int, int]
) -> None:
    from symprune.fed.flower.deploy import running

    first = make(tmp_path, ports)
    with running(first):
        first.submit()
        until(lambda: first.rounds_done() >= 1)
        first.kill("superlink", signal.SIGKILL)
        assert not first.result.exists()
    with running(make(tmp_path, ports)) as second:
        second.submit()
        until(second.finished)
    check_the_bits(tmp_path, TASK)


@pytest.mark.slow
def test_a_round_finishes_without_a_killed_supernode_and_it_comes_back(
    tmp_path: Path, ports: tuple[int, int]
) -> None:
    from symprune.fed.algorithms.shared.control_variates import control_variates
    from symprune.fed.flower.deploy import running

    task = TrainingJob(TASK.algorithm, TASK.options, PROBLEM, rounds=8)
    with running(make(tmp_path, ports, task)) as deployment:
        deployment.submit()
        until(lambda: deployment.rounds_done() >= 1)
        deployment.kill("node-1", signal.SIGKILL)
        alone = deployment.rounds_done() + 2
        until(lambda: deployment.rounds_done() >= alone)
        deployment.start_node(1)
        until(deployment.finished)
    there = snapshot.load(tmp_path / "server" / "state.safetensors")
    assert min(record["replies"] for record in there.history[1:]) == 1
    assert there.history[-1]["replies"] == 2
    rows = [
        client_state(tmp_path / f"client-{i}", there.run, int(there.client["counted"][i]))
        for i in range(2)
    ]
    client = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    prepared = task.build_algorithm().prepare(task.whole_problem().constants())
    h = control_variates(prepared, there.server, client)  # type: ignore[arg-type]
    assert float(h.sum(0).norm()) < 1e-5 * float(h.norm(dim=1).mean())
