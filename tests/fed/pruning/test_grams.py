"""Gram matrices that clients add up: refined masks and updated weights of central pruning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from parties import central, run, same, shares, tokens
from torch import Tensor, nn

from symprune.engine import walk
from symprune.errors import SympruneError
from symprune.fed import pruning
from symprune.fed.pruning import Client, Server, messages
from symprune.fed.pruning.aggregate import grams
from symprune.fed.wire.payload import decode_message, encode_message
from symprune.gram import GramSum, scale_of
from symprune.recipe import Recipe

SWAP = Recipe(method="wanda", refine="swap")
LSQ = Recipe(method="wanda", update="lsq")
BOTH = Recipe(method="ria", pattern="2:4", refine="swap", update="lsq")
ROUNDS = Recipe(method="wanda", update={"name": "lsq", "rounds": 3})
SPARSEGPT = Recipe(update="sparsegpt")
RECIPES = {"swap": SWAP, "lsq": LSQ, "both": BOTH, "rounds": ROUNDS, "sparsegpt": SPARSEGPT}


def furthest(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of a weight, in units of its matrix's largest."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float(((p - q).abs().max() / q.abs().max()).detach()) for p, q in pairs)


@pytest.mark.parametrize("name", RECIPES)
def test_exact_gram_matrices_give_central_weights_bit_for_bit(name: str) -> None:
    model, result = run(RECIPES[name])
    assert same(model, central(RECIPES[name], tokens()))
    assert result.report.notes[0].startswith("The server sees every client's Gram matrices")


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("name", ["swap", "both", "rounds"])
def test_masked_gram_matrices_give_the_weights_up_to_their_rounding(name: str, bits: int) -> None:
    """An entry is rounded to 2^-31 of its channels' lengths or less, an fp32 number to 2^-24."""
    model, _ = run(RECIPES[name], secure=True, gram_bits=bits)
    expected = central(RECIPES[name], tokens())
    assert furthest(model, expected) < 1e-4
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(found != 0, wanted != 0) for found, wanted in pairs)


@pytest.mark.parametrize("secure", [False, True])
def test_sixteen_bits_give_nearly_the_weights_and_the_same_with_masks(secure: bool) -> None:
    model, result = run(LSQ, secure=secure, gram_bits=16)
    assert 0 < furthest(model, central(LSQ, tokens())) < 1e-2
    assert result.report.sparsity == 0.5


@pytest.mark.parametrize("family", ["gpt2", "qwen3-moe", "mamba", "gemma4"])
def test_clients_that_forget_get_the_weights_of_every_family(family: str, tmp_path: Path) -> None:
    """The updated weights come with the masks, whatever passes between the blocks besides."""
    model = families.model(family)
    server = Server(model, LSQ, len(shares()))

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        new = {
            n: Client(
                families.model(family), shares()[n], folder=tmp_path / str(n), allow_few_tokens=True
            )
            for n in outgoing
        }
        return {n: new[n](data) for n, data in outgoing.items()}

    pruning.run(server, send)
    expected = central(LSQ, tokens(), family)
    if family == "qwen3-moe":  # an expert the first sample did not reach has no common scale
        assert furthest(model, expected) < 1e-5
    else:
        assert same(model, expected)


def test_updated_weights_are_rounded_to_what_is_stored_before_they_are_sent() -> None:
    """A model that is computed in fp32 and stored in 16 bits."""
    model = families.model().bfloat16()
    stored = {name: torch.bfloat16 for name, _ in model.named_parameters()}
    pruning.prune(model.float(), shares(), LSQ, stored=stored)
    expected = families.model().bfloat16().float()
    blocks = walk.Blocks(walk.find_layout(expected), stored=torch.bfloat16)
    walk.prune(expected, tokens(), LSQ, blocks=blocks)
    assert same(model, expected)
    assert all(torch.equal(p.bfloat16().float(), p) for p in model.parameters())


class Killed(Exception):
    """Stands for the server's end."""


def attempt(folder: Path, lives: int, secure: bool = False) -> nn.Module:
    """A server that dies once a message was heard. Every message is answered by new processes."""
    model, sent = families.model(), 0

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        nonlocal sent
        new = {
            n: Client(families.model(), shares()[n], folder=folder / str(n), allow_few_tokens=True)
            for n in outgoing
        }
        replies = {n: new[n](data) for n, data in outgoing.items()}
        if sent == lives:
            raise Killed
        sent += 1
        return replies

    server = Server(model, BOTH, len(shares()), secure)
    pruning.run(server, send, checkpoint=folder / "run.safetensors")
    return model


@pytest.mark.parametrize("message", range(1, 6))
def test_any_message_may_be_the_servers_last(tmp_path: Path, message: int) -> None:
    """The introduction, two messages for each of two blocks, the end."""
    with pytest.raises(Killed):
        attempt(tmp_path, message)
    assert same(attempt(tmp_path, 99), central(BOTH, tokens()))


def test_a_server_that_sums_securely_goes_on_as_well(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        attempt(tmp_path / "one", 3, secure=True)
    resumed = attempt(tmp_path / "one", 99, secure=True)
    assert same(resumed, attempt(tmp_path / "other", 99, secure=True))


@pytest.mark.parametrize("message", [1, 2])
def test_a_client_that_is_gone_is_left_out_of_all_of_a_blocks_sums(message: int) -> None:
    """Also of those it had sent before."""

    def gone(client: int, number: int, reply: bytes) -> bytes | None:
        return None if client == 0 and number == message else reply

    model, result = run(LSQ, gone)
    assert result.clients_left == [1, 2]
    assert same(model, central(LSQ, torch.cat(shares()[1:])))


def test_a_broken_gram_matrix_is_named_and_does_not_count() -> None:
    def broken(client: int, number: int, reply: bytes) -> bytes:
        if client != 1 or number != 2:
            return reply
        fields = decode_message(reply)
        return encode_message({**fields, "gram0": fields["gram0"][:-1]})

    model, result = run(LSQ, broken)
    assert result.clients_left == [0, 2] and "gram0" in result.report.notes[-1]
    assert same(model, central(LSQ, torch.cat([shares()[0], shares()[2]])))


def test_an_owner_need_not_send_gram_matrices() -> None:
    model = families.model()
    clients = [
        Client(model, part, gram=number != 1, allow_few_tokens=True)
        for number, part in enumerate(shares())
    ]

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        if 1 in outgoing:
            with pytest.raises(SympruneError, match="its owner has not set gram"):
                clients[1](outgoing[1])
        return {n: clients[n](data) for n, data in outgoing.items() if n != 1}

    result = pruning.run(Server(model, LSQ, 3), send)
    assert result.clients_left == [0, 2]
    clients = [
        Client(families.model(), part, gram=False, allow_few_tokens=True) for part in shares()
    ]
    plain = Server(families.model(), Recipe(), 3)
    result = pruning.run(plain, lambda out: {n: clients[n](data) for n, data in out.items()})
    assert result.clients_left == [0, 1, 2]


def test_a_message_that_comes_twice_is_answered_twice_and_changes_nothing() -> None:
    model = families.model()
    clients = [Client(model, part, allow_few_tokens=True) for part in shares()]

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        first, second = ({n: clients[n](data) for n, data in outgoing.items()} for _ in range(2))
        assert first == second or messages.read_head(first[0])[1] == messages.HELLO
        return second

    pruning.run(Server(model, LSQ, 3), send)
    assert same(model, central(LSQ, tokens()))


def test_no_stream_hides_two_gram_matrices() -> None:
    """A server that asks again with other lengths must not learn the difference."""
    model = families.model()
    server = Server(model, LSQ, 3, secure=True)
    clients = [Client(model, part, allow_few_tokens=True) for part in shares()]
    server.welcome({n: clients[n](m) for n, m in server.hello().items()})
    for _ in ("shares", "sums", "shares of these"):
        server.take(0, {n: clients[n](m) for n, m in server.ask(0).items()})
    request = server.ask(0)[0]
    fields = decode_message(request)
    assert clients[0](request) == clients[0](request)
    with pytest.raises(SympruneError, match="told two stories about sum 1"):
        clients[0](encode_message({**fields, "scale": fields["scale"] * (1.0 + 2**-40)}))


@pytest.mark.parametrize("message", [3, 4])
def test_who_leaves_between_sums_and_gram_matrices_stops_the_run(message: int) -> None:
    """Whether before it has taken its masks off or after: its squares would be the difference."""

    def gone(client: int, number: int, reply: bytes) -> bytes | None:
        return None if client == 1 and number == message else reply

    with pytest.raises(SympruneError, match="Client 1 is gone between a block's sums and its Gram"):
        run(LSQ, gone, secure=True)


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({}, BOTH),
        ({"secure": True}, LSQ),
        ({"gram_bits": 16}, SWAP),
        ({"aggregate": "votes"}, Recipe()),
        ({"aggregate": "average", "secure": True}, LSQ),
        ({"aggregate": "average"}, LSQ),
    ],
)
def test_the_ledger_counts_every_byte_and_the_forecast_comes_close(
    options: dict[str, Any], recipe: Recipe
) -> None:
    lengths, told = {"up": 0, "down": 0}, []
    model = families.model()
    clients = [Client(model, part, allow_few_tokens=True) for part in shares()]

    def send(outgoing: Mapping[int, bytes]) -> dict[int, bytes]:
        replies = {n: clients[n](data) for n, data in outgoing.items()}
        lengths["down"] += sum(map(len, outgoing.values()))
        lengths["up"] += sum(map(len, replies.values()))
        return replies

    result = pruning.run(Server(model, recipe, 3, **options), send, tell=told.append)
    record = result.to_dict()["federated"]
    traffic, expected = record["traffic"], record["forecast_per_client"]
    assert (traffic["bytes_up"], traffic["bytes_down"]) == (lengths["up"], lengths["down"])
    around = 3000  # bytes of a client's heads, names and keys
    assert 0.6 * expected["up"] < lengths["up"] / 3 < expected["up"] + around
    assert 0.9 * expected["down"] < lengths["down"] / 3 < expected["down"] + around
    assert told[0] == result.forecast.sentence


def halves(parts: list[Tensor], scale: Tensor) -> list[grams.Half]:
    found = []
    for part in parts:
        one = GramSum(part.shape[-1], "cpu", scale)
        for sample in part:
            one.add(sample)
        found.append(one.upper())
    return found


@pytest.mark.parametrize("channels", [1, 7, 600])
def test_half_of_a_gram_matrix_is_all_of_it(channels: int) -> None:
    inputs = torch.randn(3, 5, channels, generator=torch.Generator().manual_seed(0))
    whole = GramSum(channels, "cpu")
    for sample in inputs:
        whole.add(sample)
    copy = GramSum(channels, "cpu", whole.scale)
    copy.load_upper(*whole.upper())
    copy.add(inputs[0])
    whole.add(inputs[0])
    assert torch.equal(copy.whole(), whole.whole())


@pytest.mark.parametrize("bits", [64, 32, 16])
def test_whole_numbers_of_a_gram_matrix_add_up_to_it(bits: int) -> None:
    """Within half a unit for each client, of the channels' lengths; its diagonal exactly."""
    generator = torch.Generator().manual_seed(1)
    size = torch.logspace(-4, 4, 9)  # channels of very different size, and one that is zero
    parts = [torch.randn(2, 6, 9, generator=generator) * size for _ in range(3)]
    for part in parts:
        part[..., 4] = 0
    everything = torch.cat(parts).view(-1, 9).double()
    exact = everything.T @ everything
    lengths = exact.diagonal().sqrt()
    clients = halves(parts, scale_of(parts[0][0]))
    units = [grams.to_units(half, lengths, bits, 3) for half in clients]
    total = grams.from_units(sum(units[1:], units[0]), lengths, bits, 3)
    above = torch.ones(9, 9, dtype=torch.bool).triu()
    unit = torch.outer(lengths, lengths)[above] * max(2.0 ** -(bits - 1.1), 2.0**-23)
    assert ((total - exact[above]).abs() <= 3 * unit).all()
    at = torch.tensor([[i * 9 - i * (i - 1) // 2] for i in range(9)]).squeeze(1)
    assert torch.allclose(total[at], lengths.square(), rtol=1e-12)


def test_lengths_that_are_too_short_are_refused() -> None:
    half = halves([torch.ones(1, 4, 3)], torch.ones(3, dtype=torch.float64))[0]
    with pytest.raises(SympruneError, match="smaller than its own"):
        grams.to_units(half, torch.ones(3, dtype=torch.float64), 16, 2)
