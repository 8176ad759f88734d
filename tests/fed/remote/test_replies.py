"""Broken and hostile clients: refused, named, and without influence on the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from machines import Network, job, same

from symprune.errors import SympruneError
from symprune.fed.protocol import Like, State
from symprune.fed.remote.loop import Outcome
from symprune.fed.remote.replies import deliveries, largest, open_reply
from symprune.fed.remote.server import serve
from symprune.fed.wire.bits import varints
from symprune.fed.wire.envelope import Letter, unpack
from symprune.fed.wire.payload import decode_message, encode_message

D = 650  # parameters of softmax regression on digits
Forge = Callable[[bytes], bytes]


def fields(**tensors: torch.Tensor) -> Forge:
    """A well-formed reply with other fields."""
    return lambda reply: Letter(unpack(reply).header, (encode_message(tensors),)).pack()


def header(**entries: object) -> Forge:
    def forge(reply: bytes) -> bytes:
        letter = unpack(reply)
        return Letter({**letter.header, **entries}, letter.parts).pack()

    return forge


def body(data: bytes) -> Forge:
    return lambda reply: Letter(unpack(reply).header, (data,)).pack()


def not_finite(reply: bytes) -> bytes:
    letter = unpack(reply)
    part = bytearray(letter.parts[0])
    part[-4:] = b"\x00\x00\xc0\x7f"  # the last float becomes NaN
    return Letter(letter.header, (bytes(part),)).pack()


def bomb(values: int) -> bytes:
    """A few bytes that claim to be a vector of so many zeros, in index form."""
    return b"\x01\x01w" + bytes([0 | 1 << 4]) + varints(1, values, 0)


FORGED: dict[str, tuple[Forge, str]] = {
    "shape": (fields(w=torch.ones(D - 1)), "shape"),
    "one number": (fields(w=torch.ones(1)), "shape"),
    "dtype": (fields(w=torch.ones(D, dtype=torch.float64)), "float64"),
    "not finite": (not_finite, "not finite"),
    "field": (fields(v=torch.ones(D)), "fields"),
    "two fields": (fields(w=torch.ones(D), v=torch.ones(1)), "claims 1 values"),
    "no field": (fields(), "fields"),
    "too long": (body(b"0" * 1_000_000), "bytes"),
    "bomb": (body(bomb(1 << 40)), "claims"),
    "small bomb": (body(bomb(D + 1)), "claims"),
    "many bombs": (body(b"\x7f" + bomb(D)[1:] * 127), "claims"),
    "empty": (lambda reply: b"", "no header"),
    "noise": (lambda reply: b"\x80\x04\x95" * 99, "header"),
    "pickle": (lambda reply: b"\x80\x04cos\nsystem\n(S'true'\ntR.", "header"),
    "other round": (header(turn=0), "round 0"),
    "status": (header(status="lost?"), "not the reply"),
    "bits": (header(bits=-1), "bits"),
    "complaint": (lambda reply: Letter({"status": "error", "reason": "no disk"}).pack(), "no disk"),
}


def run(folder: Path, name: str, forge: Callable[[bytes], bytes | None]) -> Outcome:
    """Client 1 is the hostile one, in round 1."""

    def after(number: int, client: int, reply: bytes) -> bytes | None:
        return forge(reply) if (number, client) == (1, 1) else reply

    network = Network(folder / "clients", after=after)
    return serve(job(name), network, folder / "server", pause=0)


@pytest.fixture(scope="module")
def without_it(tmp_path_factory: pytest.TempPathFactory) -> State:
    """The server's state when the client says nothing in that round."""
    return run(tmp_path_factory.mktemp("silent"), "fedavg", lambda reply: None).server


@pytest.mark.parametrize("kind", list(FORGED))
def test_a_reply_that_is_wrong_is_refused_named_and_without_influence(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, without_it: State
) -> None:
    forge, reason = FORGED[kind]
    with caplog.at_level(logging.WARNING, "symprune.fed"):
        outcome = run(tmp_path, "fedavg", forge)
    assert same(outcome.server, without_it)
    assert "Client 1, round 1: refused" in caplog.text and reason in caplog.text


@pytest.mark.parametrize("name", ["fedspa", "sub-fedavg", "fedsparse"])
def test_a_mask_that_does_not_fit_is_refused(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def forge(reply: bytes) -> bytes:
        letter = unpack(reply)
        content = decode_message(letter.parts[0])
        mask = next(k for k, v in content.items() if v.dtype == torch.bool)
        content[mask][0] = ~content[mask][0]
        return Letter(letter.header, (encode_message(content),)).pack()

    with caplog.at_level(logging.WARNING, "symprune.fed"):
        outcome = run(tmp_path / "forged", name, forge)
    assert "Client 1, round 1: refused" in caplog.text
    assert same(outcome.server, run(tmp_path / "silent", name, lambda reply: None).server)


def test_strangers_and_second_replies_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    asked = {"letter-a": 0, "letter-b": 1}
    numbers = {70: 0, 71: 1, 72: 2}
    came = [
        ("letter-b", 71, b"one"),
        ("letter-b", 71, b"one again"),
        ("letter-a", 71, b"for another"),
        ("letter-a", 99, b"unknown node"),
        ("letter-x", 70, b"unknown letter"),
        ("letter-a", 70, b"zero"),
    ]
    with caplog.at_level(logging.WARNING, "symprune.fed"):
        assert list(deliveries(asked, came, numbers).items()) == [(0, b"zero"), (1, b"one")]
    assert "second reply of client 1" in caplog.text
    assert "node 99" in caplog.text and len(caplog.records) == 4


def test_the_largest_reply_is_as_long_as_a_dense_one() -> None:
    like = {"w": Like(torch.float32, (1000,))}
    dense = encode_message({"w": torch.ones(1000)})
    assert len(dense) < largest(like) < len(dense) + 5000
    assert torch.equal(open_reply(dense, like)["w"], torch.ones(1000))
    with pytest.raises(SympruneError, match="claims"):
        open_reply(encode_message({"w": torch.ones(1001)}), like)
