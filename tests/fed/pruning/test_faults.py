"""Federated pruning with clients that vanish, break, lie or repeat themselves."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from typing import Any

import families
import pytest
import torch
from parties import central, run, same, shares, tokens
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed import pruning
from symprune.fed.pruning import Client, Privacy, Server, messages
from symprune.fed.wire.payload import decode_message, encode_message
from symprune.recipe import Recipe


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("block", [0, 1])
def test_a_client_that_is_gone_is_left_out_from_that_block_on(block: int, secure: bool) -> None:
    """The first message is the introduction; one block is one exchange. For secure sums shares are
    dealt out first, and one block is two exchanges."""
    last = 2 * block + 2 if secure else block + 1

    def gone(client: int, message: int, reply: bytes) -> bytes | None:
        return None if client == 1 and message == last else reply

    model, result = run(Recipe(), gone, secure=secure)
    assert result.clients_left == [0, 2]
    assert result.report.notes == ["Client 1 was left out: It did not answer."]
    others = torch.cat([shares()[0], shares()[2]])
    tokens_seen = [layer.tokens for layer in result.report.layers]
    everyone, without = tokens().numel(), others.numel()
    assert tokens_seen == ([without] * 14 if block == 0 else [everyone] * 7 + [without] * 7)
    if block == 0:
        assert same(model, central(Recipe(), others))


def test_too_few_clients_stop_the_run() -> None:
    with pytest.raises(SympruneError, match="Too few clients are left"):
        run(Recipe(), lambda client, message, reply: None if message == 1 else reply)
    with pytest.raises(SympruneError, match="Too few clients are left"):
        run(Recipe(), lambda c, m, reply: None if c and m == 1 else reply, secure=True)


def with_field(reply: bytes, name: str, value: Tensor) -> bytes:
    return encode_message({**decode_message(reply), name: value})


def not_finite(reply: bytes) -> bytes:
    fields = decode_message(reply)
    marker = torch.tensor([12345.678], dtype=torch.float64)
    data = with_field(reply, "values", fields["values"].index_fill(0, torch.tensor([3]), 12345.678))
    infinite = torch.tensor([torch.inf], dtype=torch.float64).numpy().tobytes()
    return data.replace(marker.numpy().tobytes(), infinite)


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "too short": lambda r: r[:-1],
    "too long": lambda r: r + b"\0",
    "empty": lambda r: b"",
    "noise": lambda r: bytes(reversed(r)),
    "wrong length": lambda r: with_field(r, "values", torch.zeros(5, dtype=torch.float64)),
    "wrong shape": lambda r: with_field(r, "counts", torch.zeros(2, 4, dtype=torch.int64)),
    "wrong type": lambda r: with_field(r, "values", decode_message(r)["values"].float()),
    "not finite": not_finite,
    "huge": lambda r: with_field(r, "values", torch.zeros(10**7, dtype=torch.float64)),
    "another field": lambda r: encode_message({**decode_message(r), "more": torch.zeros(1)}),
    "too many samples": lambda r: with_field(r, "counts", decode_message(r)["counts"] + 10**6),
    "negative": lambda r: with_field(r, "counts", -decode_message(r)["counts"]),
    "negative squares": lambda r: with_field(r, "values", -decode_message(r)["values"]),
    "another block": lambda r: with_field(r, "head", messages.head(messages.ROUND, 1, 0)),
    "another kind": lambda r: with_field(r, "head", messages.head(messages.FINISH)),
    "another version": lambda r: with_field(r, "head", messages.head(messages.ROUND) * 9),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_reply_is_named_and_does_not_count(how: str) -> None:
    def broken(client: int, message: int, reply: bytes) -> bytes:
        return BROKEN[how](reply) if client == 1 and message == 1 else reply

    model, result = run(Recipe(), broken)
    assert result.clients_left == [0, 2] and len(result.report.notes) == 1
    assert result.report.notes[0].startswith("Client 1 was left out: ")
    assert same(model, central(Recipe(), torch.cat([shares()[0], shares()[2]])))


def test_replies_of_unknown_clients_are_ignored() -> None:
    model = families.model()
    clients = [Client(model, part, allow_few_tokens=True) for part in shares()]

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        replies = {n: clients[n](data) for n, data in outgoing.items()}
        return {**replies, 7: replies[0]}

    result = pruning.run(Server(model, Recipe(), 3), send)
    assert same(model, central(Recipe(), tokens())) and result.clients_left == [0, 1, 2]


def test_a_client_with_another_model_is_left_out() -> None:
    model = families.model()
    clients = [
        Client(model, shares()[0], allow_few_tokens=True),
        Client(families.model(seed=1), shares()[1], allow_few_tokens=True),
    ]
    server = Server(model, Recipe(), 2)
    result = pruning.run(server, lambda out: {n: clients[n](data) for n, data in out.items()})
    assert result.report.notes == ["Client 1 was left out: It has another model."]


def test_a_client_refuses_a_server_that_does_not_keep_to_the_protocol() -> None:
    model = families.model()
    server, client = (
        Server(model, Recipe(), 1),
        Client(copy.deepcopy(model), tokens(), allow_few_tokens=True),
    )
    hello, ask = server.hello()[0], server.ask(0)[0]
    with pytest.raises(SympruneError, match="before it was introduced"):
        client(ask)
    server.welcome({0: client(hello)})
    first = client(ask)
    with pytest.raises(SympruneError, match="at block 0 was asked for block 2"):
        client(encode_message({"head": messages.head(messages.ROUND, 2)}))
    with pytest.raises(SympruneError, match="told it is finished"):
        client(server.hello() and messages.write(messages.head(messages.FINISH)))
    assert server.take(0, {0: first})
    with pytest.raises(SympruneError):
        client(server.ask(1)[0][:-20])
    for bad in (b"", b"\x01", b"\xff" * 40, hello[:-1]):
        with pytest.raises(SympruneError):
            client(bad)


@pytest.mark.parametrize("secure", [False, True])
def test_a_message_that_comes_twice_is_answered_twice_and_changes_nothing(secure: bool) -> None:
    model = families.model()
    clients = [Client(model, part, allow_few_tokens=True) for part in shares()]

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        first, second = ({n: clients[n](data) for n, data in outgoing.items()} for _ in range(2))
        assert first == second or messages.read_head(first[0])[1] == messages.HELLO
        return second

    pruning.run(Server(model, Recipe(refine="dsnot"), 3, secure), send)
    assert same(model, central(Recipe(refine="dsnot"), tokens()))


@pytest.mark.parametrize(
    ("recipe", "options", "culprit"),
    [
        (Recipe(pattern="5:9"), {}, "Pattern 5:9"),
        (Recipe(allocate="owl"), {}, "--allocate owl is not for federated"),
        (Recipe(method="wanda-plus-plus"), {}, "Method wanda-plus-plus needs a gradient"),
        (Recipe(pattern="2:4", permute="mlp"), {}, "--permute takes an order"),
        (Recipe(self_samples=4), {}, "--self-samples adds text"),
        (Recipe(values="int4"), {}, "--values is not decided federatedly"),
        (Recipe(reconstruct="block"), {}, "--reconstruct trains on what passes a block"),
        (Recipe(), {"aggregate": "median"}, "aggregate"),
        (Recipe(update="lsq"), {"aggregate": "votes"}, "--update lsq changes weights, which votes"),
        (Recipe(refine="swap"), {"gram_bits": 8}, "64, 32 or 16 bits a number, not 8"),
        (Recipe(), {"gram_bits": 16}, "--gram-bits goes with"),
        (Recipe(update="lsq"), {"gram_bits": 16, "aggregate": "average"}, "--gram-bits goes with"),
        (Recipe(update="lsq"), {"privacy": Privacy(8.0)}, "--epsilon does not go with lsq"),
        (Recipe(refine="swap"), {"privacy": Privacy(8.0)}, "--epsilon does not go with swap"),
        (Recipe(), {"privacy": Privacy(8.0), "aggregate": "votes"}, "--epsilon protects sums"),
    ],
)
def test_what_cannot_be_decided_or_hidden_is_refused(
    recipe: Recipe, options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(SympruneError, match=culprit) as caught:
        pruning.prune(families.model(), shares(), recipe, reference=tokens(), **options)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_bad_client_data_is_refused() -> None:
    for bad in (torch.zeros(0, 4, dtype=torch.long), torch.zeros(4, dtype=torch.long)):
        with pytest.raises(SympruneError, match="filled"):
            pruning.prune(families.model(), [bad], Recipe())
    with pytest.raises(SympruneError, match="at least one client"):
        pruning.prune(families.model(), [], Recipe())
    with pytest.raises(SympruneError, match=r"one length, not of \[8, 13\] tokens"):
        pruning.prune(families.model(), [tokens(), families.tokens(2, 8)], Recipe())
    with pytest.raises(SympruneError, match="cannot be split over 9 clients"):
        pruning.split(tokens(), 9)


def test_a_false_reply_behind_masks_stops_the_run() -> None:
    """Nobody can say whose it was, so nothing may be decided from it."""

    def false(client: int, message: int, reply: bytes) -> bytes:
        if client != 1 or message != 2:
            return reply
        return with_field(reply, "wide", torch.randint_like(decode_message(reply)["wide"], 9**9))

    with pytest.raises(SympruneError, match="who it was cannot be told"):
        run(Recipe(), false, secure=True)


def test_odd_samples_and_absurd_claims_are_left_out() -> None:
    model = families.model()
    parts = [*shares(), families.tokens(2, 9)]
    clients = [Client(model, part, allow_few_tokens=True) for part in parts]

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        replies = {n: clients[n](data) for n, data in outgoing.items()}
        if 2 in replies and messages.read_head(replies[2])[1] == messages.HELLO:
            absurd = messages.head(messages.HELLO, 2**62, 2**62)
            replies[2] = with_field(replies[2], "head", absurd)
        return replies

    result = pruning.run(Server(model, Recipe(), 4), send)
    assert same(model, central(Recipe(), torch.cat(shares()[:2])))
    assert result.report.notes == [
        f"Client 2 was left out: It claims {2**62} samples of {2**62} tokens.",
        "Client 3 was left out: Its samples have 9 tokens, not 13.",
    ]


@pytest.mark.parametrize("secure", [False, True])
def test_flipped_bytes_are_refused_or_read_but_never_crash(secure: bool) -> None:
    model = families.model()
    server = Server(model, Recipe(), 2, secure)
    clients = [Client(model, part, allow_few_tokens=True) for part in shares()[:2]]
    server.welcome({n: clients[n](m) for n, m in server.hello().items()})
    reply = {n: clients[n](m) for n, m in server.ask(0).items()}[1]
    chance, refused = random.Random(0), 0
    for _ in range(300):
        data = bytearray(reply)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(min(len(data), 120))] = chance.randrange(256)
        try:
            server._statistics(1, 0, bytes(data))
        except SympruneError:
            refused += 1
    assert refused > 150
