"""The client's process that stays: the same bits, one process, ended with its SuperNode."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from symprune.errors import SympruneError
from symprune.fed.flower.resident import resident, socket_of
from symprune.fed.remote.client import answer
from symprune.fed.remote.transport import Node
from symprune.fed.wire.envelope import Letter
from symprune.fed.wire.payload import encode_message

TRAINING = "symprune.fed.remote.client"
CODE = """
import os

from symprune.errors import SympruneError


def answer(data, node):
    if data == b"refuse":
        raise SympruneError("No.")
    if data == b"break":
        raise KeyError("what")
    if data == b"die":
        os._exit(3)
    return f"{os.getpid()} {node.number} {node.config['a']} {len(data)}".encode()
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node whose client is a few lines; what was started for it is ended afterwards."""
    (tmp_path / "quick_client.py").write_text(CODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Node(3, tmp_path / "n", {"a": 1})


def stayed(node: Node, module: str) -> list[psutil.Process]:
    place = str(socket_of(node.folder, module))
    return [p for p in psutil.process_iter(["cmdline"]) if place in (p.info["cmdline"] or [])]


def end(node: Node, module: str) -> None:
    for process in stayed(node, module):
        process.kill()
        process.wait()


def test_one_process_answers_all_letters_and_another_takes_its_place(node: Node) -> None:
    ask = resident("quick_client")
    try:
        first, second = ask(b"abc", node).split(), ask(bytes(3_000_000), node).split()
        assert first[1:] == [b"3", b"1", b"3"] and second[3] == b"3000000"
        assert first[0] == second[0] != str(os.getpid()).encode()
        (process,) = stayed(node, "quick_client")
        assert str(process.pid).encode() == first[0]
        with pytest.raises(SympruneError, match=r"^No\.$"):
            ask(b"refuse", node)
        with pytest.raises(RuntimeError, match="KeyError"):
            ask(b"break", node)
        with pytest.raises(SympruneError, match="The client's process ended"):
            ask(b"die", node)
        assert ask(b"abc", node).split()[1:] == first[1:]
        for file in node.folder.iterdir():
            assert file.stat().st_mode & 0o077 == 0, file
        assert node.folder.stat().st_mode & 0o077 == 0
    finally:
        end(node, "quick_client")


def test_it_ends_with_its_supernode(node: Node) -> None:
    node.folder.mkdir()
    place = socket_of(node.folder, "quick_client")
    with subprocess.Popen(["sleep", "1000"]) as supernode:
        command = [sys.executable, "-m", "symprune.fed.flower.resident"]
        with subprocess.Popen(
            [*command, "quick_client", str(place), str(supernode.pid)]
        ) as started:
            supernode.kill()
            supernode.wait()
            assert started.wait() == 0
    assert not place.exists()


def test_a_folder_with_a_long_name_is_answered_for_in_this_process(node: Node) -> None:
    far = replace(node, folder=node.folder / ("far" * 40))
    header = {"status": "error"}
    assert resident(TRAINING)(b"no letter", far) == answer(b"no letter", far)
    assert header["status"] in answer(b"no letter", far).decode()


def test_what_stays_answers_to_the_bit_what_a_new_process_answers(tmp_path: Path) -> None:
    """Two rounds, the second of which goes on from what the first left."""
    problem = {"data": "digits", "split": "class:2", "clients": 4, "l2": 0.1}
    about = {"kind": "turn", "run": "a", "n": 4, "algorithm": "sparse-proxskip", "work": True}
    about |= {"options": {"gamma": 0.1, "p": 0.5, "sparsity": 0.5}, "problem": problem}
    about |= {"seed": 0, "client": 0, "masks": ""}
    one, other = (Node(0, tmp_path / name) for name in ("here", "there"))
    ask = resident(TRAINING)
    try:
        for turn in range(2):
            body = encode_message({"x": torch.full((650,), 0.01 * turn)})
            letter = Letter({**about, "turn": turn, "counted": turn - 1}, (body,)).pack()
            assert ask(letter, other) == answer(letter, one)
        (here,), (there,) = (list(node.folder.glob("a.safetensors")) for node in (one, other))
        assert here.read_bytes() == there.read_bytes()
        assert len(stayed(other, TRAINING)) == 1
    finally:
        end(other, TRAINING)
