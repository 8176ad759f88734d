"""Letters that a hostile server sends to a client: refused in a sentence, with little memory."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import PROBLEM, Network, job

from symprune.fed.owner.policy import Policy
from symprune.fed.remote.client import answer
from symprune.fed.remote.server import serve
from symprune.fed.remote.transport import Node
from symprune.fed.secure import keys
from symprune.fed.wire.bits import varints
from symprune.fed.wire.envelope import Letter, unpack
from symprune.fed.wire.payload import encode_message

D = 650  # parameters of softmax regression on digits


def letter(algorithm: str = "gd", *parts: bytes, **header: object) -> bytes:
    """A letter of the first turn to client 0."""
    options: dict[str, Any] = {"gd": {"gamma": 0.1}, "proxskip": {"gamma": 0.1, "p": 0.5}}
    about = {"kind": "turn", "run": "a", "n": 4, "turn": 0, "counted": -1, "work": True}
    about |= {"algorithm": algorithm, "options": options.get(algorithm, {}), "problem": PROBLEM}
    about |= {"seed": 0, "client": 0, "masks": ""}
    body = parts or (encode_message({"x": torch.zeros(D)}),)
    return Letter({**about, **header}, body).pack()


def said(data: bytes, folder: Path, config: Mapping[str, Any] | None = None) -> str:
    """The reason a client gives for not taking part."""
    header = unpack(answer(data, Node(0, folder, config or {}))).header
    assert header["status"] == "error"
    return str(header["reason"])


def bomb(name: str, values: int) -> bytes:
    """Eleven bytes or so that claim to be a vector of so many zeros."""
    return varints(1, len(name)) + name.encode() + bytes([1 << 4]) + varints(1, values, 0)


def test_an_honest_letter_is_answered(tmp_path: Path) -> None:
    assert unpack(answer(letter(), Node(0, tmp_path))).header["status"] == "done"


@pytest.mark.parametrize("values", [2**31, 2**62, 5 * D + 1024])
def test_a_broadcast_is_bounded_by_the_model_before_memory_is_taken(
    values: int, tmp_path: Path
) -> None:
    assert len(bomb("x", 2**31)) == 11
    said(letter("gd", b"\0"), tmp_path)  # what a refusal takes anyway
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "claims" in said(letter("gd", bomb("x", values)), tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_what_a_client_is_given_back_is_bounded_by_its_own_state(tmp_path: Path) -> None:
    x = encode_message({"x": torch.zeros(D)})
    assert "claims" in said(letter("proxskip", x, bomb("h", 2**31)), tmp_path)
    assert "claims" in said(letter("proxskip", x, bomb("h", 3 * D)), tmp_path)
    other = encode_message({"h": torch.zeros(D, dtype=torch.float64)})
    assert "no 'h' to be given back" in said(letter("proxskip", x, other), tmp_path)
    stranger = encode_message({"secret": torch.zeros(D)})
    assert "no 'secret' to be given back" in said(letter("proxskip", x, stranger), tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        {"turn": "soon"},
        {"turn": None},
        {"counted": {}},
        {"n": 10**30},
        {"n": []},
        {"run": ["a"]},
        {"options": {"gamma": "much"}},
        {"options": 7},
        {"problem": {"data": "digits", "clients": "many"}},
        {"problem": {"data": ["digits"]}},
        {"problem": None},
        {"seed": 10**40},
        {"client": None},
        {"kind": "describe", "problem": 3},
        {"masks": 4},
    ],
    ids=str,
)
def test_a_client_answers_whatever_a_header_says(header: dict[str, Any], tmp_path: Path) -> None:
    assert said(letter(**header), tmp_path)


@pytest.mark.parametrize("missing", ["turn", "run", "n", "counted", "work", "problem"])
def test_a_client_answers_a_header_that_lacks_something(missing: str, tmp_path: Path) -> None:
    whole = unpack(letter())
    header = {name: value for name, value in whole.header.items() if name != missing}
    assert said(Letter(header, whole.parts).pack(), tmp_path)


def test_a_client_answers_a_broadcast_of_another_shape_or_none_at_all(tmp_path: Path) -> None:
    for body in ({"x": torch.zeros(3)}, {"y": torch.zeros(D)}, {"x": torch.zeros(2, 2)}):
        assert said(letter("gd", encode_message(body)), tmp_path)
    assert "no message" in said(Letter(unpack(letter()).header).pack(), tmp_path)


def test_of_an_error_nobody_foresaw_the_server_learns_the_kind_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "folder with a name that is nobody's business"
    own.write_text("a file where the client's folder should be")
    reason = said(letter(), own / "below")
    assert "business" not in reason and "could not answer" in reason
    assert "business" in caplog.text


def test_a_client_in_trouble_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "client-1").write_text("no folder")
    outcome = serve(job("gd", 2), Network(tmp_path / "clients"), tmp_path / "server", pause=0)
    assert outcome.counted.tolist() == [1, -1, 1, 1]


def grown(before: int) -> int:
    """By how many kB the memory of this process has grown beyond its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_a_network_is_bounded_before_memory_is_taken(tmp_path: Path) -> None:
    said(letter("gd", b"\0"), tmp_path)  # what a refusal takes anyway
    before = grown(0)
    for model in ("mlp:400000", "he-mlp:99999999-99999999"):
        problem = {**PROBLEM, "model": model}
        assert "20,000,000 are allowed" in said(letter(problem=problem), tmp_path)
        described = said(letter(problem=problem, kind="describe"), tmp_path)
        assert "20,000,000 are allowed" in described
    for model in ("mlp:" + "-".join(["1"] * 101), "mlp:" + "9" * 40):
        assert "by name has at most" in said(letter(problem={**PROBLEM, "model": model}), tmp_path)
    assert grown(before) < 60_000  # kB


def test_an_owner_bounds_a_network_by_its_policy_and_no_server_does(tmp_path: Path) -> None:
    problem = {**PROBLEM, "model": "mlp:16"}
    Policy(most_parameters=D - 1).save(tmp_path / "policy.yaml")
    config = {"policy": str(tmp_path / "policy.yaml")}
    assert "649 are allowed" in said(letter(problem=problem), tmp_path, config)
    wider = {**problem, "most_parameters": 10**9}
    assert "no setting 'most_parameters'" in said(letter(problem=wider), tmp_path, config)


def test_a_run_of_more_clients_than_there_can_be_takes_no_memory(tmp_path: Path) -> None:
    """The cards of a hundred million clients, all of them zero, fit into thirty bytes."""
    n = 100_000_000
    private = {"clip": 1.0, "multiplier": 4.0, "rate": 1.0, "honest": 1, "delta": 1e-5}
    about = {"private": private, "session": 1, "n": n, "problem": {"data": "digits", "clients": n}}
    sparse = bytes([6]) + b"roster" + bytes([8 | 1 << 4]) + varints(1, n, 0)
    sparse += bytes([5]) + b"cards" + bytes([5 | 1 << 4]) + varints(2, n, keys.CARD_BYTES, 0)
    before = grown(0)
    for kind in ("enter", "share", "describe"):
        asked = letter("gd", varints(2) + sparse, kind=kind, count=n, **about)
        assert "1 to 16,384 clients" in said(asked, tmp_path)
    assert grown(before) < 60_000  # kB
