"""Flower carries the letters: records, a grid without any engine, the simulation."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import Loopback
from machines import CLIENTS, job, same

from symprune.errors import SympruneError
from symprune.fed import snapshot
from symprune.fed.algorithms import ALGORITHMS
from symprune.fed.flower import apps
from symprune.fed.pruning import remote
from symprune.fed.remote import client
from symprune.fed.remote.client import answer
from symprune.fed.remote.job import TrainingJob
from symprune.fed.remote.transport import Node, refusal_in
from symprune.fed.simulate import simulate
from symprune.fed.wire.envelope import Letter
from symprune.machine.lock import alone
from symprune.maskset import MaskSet

needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="Flower is not installed"
)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None or importlib.util.find_spec("ray") is None,
    reason="Flower's simulation is not installed",
)
SIMULATED = ("fedavg", "sparse-proxskip", "ef21", "scafflix", "fedspa", "fedp3")


def test_the_package_does_not_import_flower() -> None:
    code = "import symprune.fed, symprune.fed.flower, sys; sys.exit('flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_flower_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(SympruneError, match=r"symprune\[flower\]"):
        apps.client_app(answer)


@needs_flower
@pytest.mark.parametrize("data", [b"", b"\x00", bytes(range(256)) * 1000])
def test_bytes_travel_in_a_record_as_they_are(data: bytes) -> None:
    assert apps.from_record(apps.to_record(data)) == data


@needs_flower
def test_other_records_are_refused() -> None:
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    def record(array: Array) -> RecordDict:
        return RecordDict({apps.RECORD: ArrayRecord({apps.FIELD: array})})

    good = apps.to_record(b"abc")[apps.RECORD]
    lies = Array(dtype="uint8", shape=(1 << 40,), stype=apps.STYPE, data=b"abc")
    wrong = [
        RecordDict(),
        RecordDict({apps.RECORD: ConfigRecord({"a": 1})}),
        RecordDict({"other": good}),
        RecordDict({apps.RECORD: good, "more": ConfigRecord({"a": 1})}),
        record(Array(np.zeros(3, np.uint8))),
        record(Array(dtype="float32", shape=(3,), stype=apps.STYPE, data=b"abc")),
        record(lies),
    ]
    for content in wrong:
        with pytest.raises(SympruneError, match="message"):
            apps.from_record(content)


def check_the_bits(folder: Path, task: TrainingJob) -> None:
    """The server's state and every ledger are those of the in-process run."""
    here = simulate(task.build_algorithm(), task.whole_problem(), task.rounds, clients_at_once=1)
    there = snapshot.load(folder / "server" / "state.safetensors")
    assert same(there.server, here.server)
    assert same(there.ledger, here.ledger.state())


@needs_flower
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_apps_without_an_engine_give_the_bits_of_the_in_process_run(
    name: str, tmp_path: Path
) -> None:
    task = job(name)
    grid: Any = Loopback(apps.client_app(answer), tmp_path, CLIENTS)
    config = {"job": task.to_json(), "folder": str(tmp_path), "clients": CLIENTS}
    grid.run(apps.server_app(apps.train), config)
    check_the_bits(tmp_path, task)


@needs_flower
@pytest.mark.parametrize("name", ["fedavg", "sparse-proxskip", "fedspa"])
def test_apps_with_masks_give_the_bits_of_the_in_process_run(name: str, tmp_path: Path) -> None:
    masks = MaskSet()
    masks["weight"] = torch.rand(10, 65, generator=torch.Generator().manual_seed(0)) < 0.5
    masks.save(tmp_path / "masks.safetensors")
    task = job(name)
    task = replace(task, problem={**task.problem, "masks": str(tmp_path / "masks.safetensors")})
    grid: Any = Loopback(apps.client_app(answer), tmp_path, CLIENTS)
    config = {"job": task.to_json(), "folder": str(tmp_path), "clients": CLIENTS}
    grid.run(apps.server_app(apps.train), config)
    check_the_bits(tmp_path, task)


@needs_flower
def test_a_node_that_leaves_is_named_and_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(apps, "ROLL_CALL", 0.0)
    monkeypatch.setattr(apps, "POLL", 0.0)
    grid: Any = Loopback(apps.client_app(answer), tmp_path, CLIENTS)
    grid.gone.add(899)
    transport = apps.FlowerTransport(grid, grid.nodes)
    with caplog.at_level(logging.WARNING, "symprune.fed"):
        replies = transport.exchange({0: apps.WHO, 1: apps.WHO, 2: apps.WHO})
    assert replies == {0: b"0", 2: b"2"} and transport.connected() == {0, 2, 3}
    assert "Client 1 (node 899) has left" in caplog.text


@needs_flower
def test_a_node_cannot_take_the_number_of_another(tmp_path: Path) -> None:
    grid: Any = Loopback(apps.client_app(answer), tmp_path, CLIENTS)
    grid.nodes[899] = 0
    with pytest.raises(SympruneError, match=r"No node is client \[1\]"):
        apps._numbers(grid, CLIENTS, "")
    assert apps._numbers(grid, 2, "7,5") == {7: 0, 5: 1}


@needs_ray
@pytest.mark.slow
def test_the_simulation_gives_the_bits_of_the_in_process_run(tmp_path: Path) -> None:
    """One process for all: Ray starts once."""
    code = """
import sys
from dataclasses import replace
from pathlib import Path
from machines import job
from symprune.fed.flower import simulation
for name in sys.argv[2:]:
    simulation(job(name, 2), Path(sys.argv[1]) / name)
"""
    support = str(Path(__file__).parent.parent / "support")
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {support!r})\n{code}"]
    subprocess.run([*run, str(tmp_path), *SIMULATED], check=True, timeout=1200)
    for name in SIMULATED:
        check_the_bits(tmp_path / name, job(name, 2))


@needs_flower
def test_of_a_client_that_fails_the_server_learns_nothing_and_its_owner_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower tells the server what an exception says."""
    secret = "/home/somebody/diagnoses.txt does not exist."

    def fail(data: bytes, node: Node) -> bytes:
        raise SympruneError(secret) if data == b"refuse" else KeyError(secret)

    for asked in (b"refuse", b"break"):
        grid: Any = Loopback(apps.client_app(fail), tmp_path, 1)
        with pytest.raises(SympruneError) as raised:
            apps.FlowerTransport(grid, grid.nodes).exchange({0: asked})
        assert str(raised.value) == apps.UNANSWERED and raised.value.__cause__ is None
    assert "diagnoses" in caplog.text
    lines = (tmp_path / "900" / "audit.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all("diagnoses" in json.loads(line)["refused"] for line in lines)


@needs_flower
def test_a_refusal_to_train_is_in_the_owners_audit_log_in_words(tmp_path: Path) -> None:
    grid: Any = Loopback(apps.client_app(answer), tmp_path, 1)
    (reply,) = apps.FlowerTransport(grid, grid.nodes).exchange({0: b"no letter"}).values()
    (line,) = (tmp_path / "900" / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["refused"] == refusal_in(reply) == "A letter has no header."


@pytest.mark.parametrize("of", ["training", "pruning"])
def test_two_letters_at_once_are_answered_one_after_the_other(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower has a process for each, and where a folder's name is long none that stays."""
    begun = threading.Event()

    def work(*_: Any) -> None:
        begun.set()
        raise SympruneError("That is far enough.")

    monkeypatch.setattr(client, "_take_part", work)
    monkeypatch.setattr(remote.NodeSettings, "load", work)
    node = Node(0, tmp_path, {"model": "m", "text": "t"})
    second = threading.Thread(target=lambda: _quietly(of, node))
    with alone(node.lock):
        second.start()
        assert not begun.wait(0.2)
    second.join()
    assert begun.is_set()


def _quietly(of: str, node: Node) -> None:
    with suppress(SympruneError):
        if of == "training":
            client.answer(Letter({"kind": "turn"}).pack(), node)
        else:
            remote.answer(b"", node)
