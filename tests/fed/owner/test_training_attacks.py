"""A server that asks a training client for more than its owner allows: refused in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.owner.ledger import Ledger
from symprune.fed.owner.policy import Policy
from symprune.fed.remote.client import UNTOLD, answer
from symprune.fed.remote.transport import Node
from symprune.fed.wire.envelope import Header, Letter, unpack
from symprune.fed.wire.payload import encode_message

ROWS, D = 40, 6
OPTIONS: dict[str, Any] = {"gamma": 0.1, "multiplier": 4.0, "clip": 1.0, "batch": 8}
OPTIONS |= {"private_randomness": True, "iterations": 1000}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A client with rows of its own and no policy but the default."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, D, generator=generator)
    lines = [
        f"{1 if row.sum() > 0 else -1} " + " ".join(f"{j + 1}:{v:.3f}" for j, v in enumerate(row))
        for row in x
    ]
    (tmp_path / "rows.txt").write_text("\n".join(lines) + "\n")
    return Node(0, tmp_path / "client", {"data": f"libsvm:{tmp_path / 'rows.txt'}"})


def ask(node: Node, algorithm: str = "ldp-fedp3", run: str = "a", **header: Any) -> Header:
    """What the client says to a first turn of a run."""
    options = {**OPTIONS, **header.pop("options", {})} if algorithm == "ldp-fedp3" else {}
    options = options or header.pop("options", {"gamma": 0.1})
    return unpack(answer(turn(algorithm, options, run=run, **header), node)).header


def turn(algorithm: str, options: dict[str, Any], run: str = "a", **header: Any) -> bytes:
    """The letter of a first turn."""
    about: dict[str, Any] = {"kind": "turn", "run": run, "n": 2, "turn": 0, "counted": -1}
    problem = {"data": "libsvm:there.txt", "model": "logistic", "clients": 2}
    about |= {"work": True, "algorithm": algorithm, "options": options, "problem": problem}
    about |= {"seed": 0, "client": 0, "masks": ""}
    body = encode_message({"x": torch.zeros(D)})
    return Letter({**about, **header}, (body,)).pack()


def not_told(node: Node) -> str:
    """What the owner's audit log has of the last error the server was not told."""
    lines = (node.folder / "audit.jsonl").read_text().splitlines()
    return str(json.loads(lines[-1])["not_told"])


def with_policy(node: Node, **entries: Any) -> Node:
    file = node.folder.parent / "policy.yaml"
    Policy(**entries).save(file)
    return replace(node, config={**node.config, "policy": str(file)})


def test_an_honest_server_is_answered(node: Node) -> None:
    assert ask(node)["status"] == "done"


ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "no noise": ({"options": {"multiplier": 0.0}}, "not protected, it asks for noise"),
    "no noise by epsilon": (
        {"options": {"multiplier": None, "epsilon": None}},
        "not protected, it asks for noise",
    ),
    "little noise": ({"options": {"multiplier": 0.01}}, "multiplier of 0.01 is below 0.3"),
    "a wide clip": ({"options": {"clip": 1e9}}, r"clip of 1e\+09 is outside"),
    "a clip whose norm underflows": ({"options": {"clip": 1e-170}}, "clip of 1e-170 is outside"),
    "a clip of NaN": ({"options": {"clip": float("nan")}}, "clip"),
    "noise that the server can draw": (
        {"options": {"private_randomness": False}},
        "needs private_randomness=true",
    ),
    "plain gradients": ({"algorithm": "gd"}, "not protected, it asks for noise"),
    "plain models": ({"algorithm": "fedavg"}, "not protected, it asks for noise"),
    "a run of one client": (
        {"n": 1, "problem": {"data": "libsvm:x", "model": "logistic", "clients": 1}},
        "1 clients are fewer than 2",
    ),
    "another file of masks": (
        {"problem": {"data": "a", "model": "logistic", "clients": 2, "masks": "/etc/passwd"}},
        "names the masks '/etc/passwd' by a path",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_breaks_the_default_policy_is_refused(attack: str, node: Node) -> None:
    asked, sentence = ATTACKS[attack]
    said = ask(node, **asked)
    assert said["status"] == "error"
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(said["reason"])
    assert not (node.folder / "a.safetensors").exists()


@pytest.mark.parametrize("data", ["libsvm:/etc/passwd", "leaf:/home", "/etc/passwd"])
def test_a_server_cannot_name_a_path_on_a_client_without_data(data: str, tmp_path: Path) -> None:
    bare = Node(0, tmp_path / "client")
    problem = {"data": data, "model": "logistic", "clients": 2}
    said = ask(bare, problem=problem)
    assert f"names the data {data!r} by a path" in said["reason"]
    listed = with_policy(bare, may_name=("libsvm:/nowhere",))
    assert "by a path" in ask(listed, problem=problem)["reason"]


def test_the_data_of_the_policy_is_used_whatever_the_server_names(node: Node) -> None:
    owner = with_policy(replace(node, config={}), data=str(node.config["data"]))
    described = ask(owner, kind="describe")
    assert described["rows"] == ROWS and described["own"]


def test_what_follows_from_all_rows_is_not_told_where_noise_is_asked_for(node: Node) -> None:
    private = ask(node, kind="describe")
    assert private["status"] == "described" and private["L"] is None and private["mu"] is None
    open_ = ask(with_policy(node, protection="plain"), kind="describe")
    assert open_["L"] > 0


def test_a_budget_is_not_renewed_by_a_new_run_folder_or_algorithm_option(
    node: Node, tmp_path: Path
) -> None:
    owner = with_policy(node, epsilon=0.3)
    answers = [ask(owner, run=f"run-{number}")["status"] for number in range(8)]
    spent = answers.count("done")
    assert 0 < spent < 8 and answers == ["done"] * spent + ["error"] * (8 - spent)
    elsewhere = replace(owner, folder=tmp_path / "another folder")
    assert "budget is spent" in ask(elsewhere, run="new")["reason"]
    assert "budget is spent" in ask(owner, run="new", seed=7, options={"clip": 0.5})["reason"]
    ledger = Ledger(Policy().ledger_file, 0.3, 1e-5)
    assert ledger.spent() <= 0.3


def test_work_that_is_asked_for_again_as_if_it_were_lost_is_paid_for_again(node: Node) -> None:
    """A server that forgets what it counted draws fresh noise: that is another release."""
    policy = Policy()
    file = policy.ledger_file
    first = ask(node)
    assert first == ask(node)  # the same turn: the same bytes, for nothing
    assert len(file.read_text().splitlines()) == 1
    ask(node, turn=1)
    assert len(file.read_text().splitlines()) == 2


def test_a_damaged_ledger_ends_private_training(node: Node) -> None:
    ask(node)
    file = Policy().ledger_file
    file.write_bytes(file.read_bytes()[:-20] + b"\n")
    assert ask(node, run="b")["reason"] == UNTOLD
    assert "is damaged" in not_told(node)


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"jobs": ("pruning",)}, "no training is allowed"),
        ({"algorithms": ("fedavg",)}, "ldp-fedp3 is not among its algorithms"),
        ({"least_clients": 3}, "2 clients are fewer than 3"),
        ({"least_samples": 41}, "its samples are fewer than 41"),
        ({"least_noise": 5.0}, "multiplier of 4 is below 5"),
    ],
)
def test_what_breaks_a_line_of_the_policy_is_refused(
    entries: dict[str, Any], sentence: str, node: Node
) -> None:
    assert sentence in ask(with_policy(node, **entries))["reason"]


def test_a_policy_that_cannot_be_read_answers_nobody(node: Node, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("epsilon: [")
    broken = replace(node, config={**node.config, "policy": str(tmp_path / "bad.yaml")})
    assert ask(broken)["reason"] == UNTOLD
    assert "cannot be read" in not_told(broken)


SECRET = "Agnes-Meyer-HIV"


@pytest.mark.parametrize("kind", ["describe", "turn"])
def test_an_error_that_quotes_rows_or_paths_is_told_to_nobody(kind: str, node: Node) -> None:
    """A file that is not what its owner thinks: the reader's error has words of it."""
    file = node.folder.parent / "rows.txt"
    file.write_text(f"1 1:{SECRET}\n")
    said = answer_to(node, kind)
    assert SECRET.encode() not in said and str(file).encode() not in said
    assert unpack(said).header["reason"] == UNTOLD
    assert SECRET in not_told(node) and str(file) in not_told(node)


@pytest.mark.parametrize("error", [SympruneError, ValueError, OSError])
def test_an_error_of_an_algorithm_at_work_is_told_to_nobody(
    error: type[Exception], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error(f"row 3 is {SECRET}")

    monkeypatch.setattr(type(build("ldp-fedp3")), "client_step", fail)
    said = answer_to(node, "turn")
    assert unpack(said).header["status"] == "error" and SECRET.encode() not in said
    assert SECRET in not_told(node)


def answer_to(node: Node, kind: str) -> bytes:
    return answer(turn("ldp-fedp3", OPTIONS, kind=kind), node)


def test_code_that_the_server_names_runs_only_if_the_owner_lists_it(node: Node) -> None:
    said = ask(with_policy(node, protection="plain"), "fedspa",
               options={"mask_score": "os:getcwd"})  # fmt: skip
    assert said["status"] == "error"


def test_only_algorithms_that_say_so_are_private() -> None:
    assert build("ldp-fedp3", multiplier=0.0).releases(100) is None
    release = build("ldp-fedp3", multiplier=2.0, batch=50).releases(100)
    assert release is not None and (release.rate, release.multiplier) == (0.5, 2.0)
