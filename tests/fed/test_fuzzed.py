"""Payloads, letters, messages, jobs and saved runs that are nearly right: read, or refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import yaml
from fuzzing import EXAMPLES, changed, changed_json, damaged, fuzz, little_room
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from symprune.errors import SympruneError
from symprune.fed import pruning, snapshot
from symprune.fed.compare.plan import read_plan
from symprune.fed.protocol import Like
from symprune.fed.pruning import Client, Server, client_state, messages, server_state
from symprune.fed.pruning.noise import Privacy
from symprune.fed.pruning.remote import Task
from symprune.fed.remote import records
from symprune.fed.remote.job import TrainingJob, job_from_json
from symprune.fed.remote.private_client import Session, load_session, save_session
from symprune.fed.remote.replies import open_reply
from symprune.fed.remote.sentences import sentence
from symprune.fed.secure.party import Party, Trust
from symprune.fed.wire.envelope import Letter, unpack
from symprune.fed.wire.grid import fit_grid, round_to
from symprune.fed.wire.payload import decode, decode_as, decode_message, encode, encode_message
from symprune.recipe import Recipe
from symprune.stats import MOMENTS, SQUARE, Needs

SPARSE = torch.zeros(40).index_fill(0, torch.tensor([3, 17, 30]), 2.5)


def on_a_grid(row: torch.Tensor, bits: int) -> bytes:
    grid = fit_grid(row.unsqueeze(0), bits)
    return encode(round_to(row.unsqueeze(0), grid, torch.zeros(1, len(row)))[0], grid=grid)


PAYLOADS = {
    "dense": encode(torch.linspace(-1, 1, 12).view(3, 4)),
    "indexed": encode(SPARSE),
    "masked": encode(torch.where(torch.arange(30) % 2 == 0, 1.0, 0.0).to(torch.float64)),
    "coded": encode(torch.tensor([0.5, -0.5, 0.0, 0.5] * 8), table=True),
    "grid": on_a_grid(torch.linspace(-1, 1, 150), 8),
    "sparse grid": on_a_grid(torch.where(torch.arange(900) % 9 == 0, 1.5, 0.0), 4),
    "booleans": encode(torch.arange(30) % 3 == 0),
    "whole numbers": encode(torch.arange(9, dtype=torch.int16)),
}
FIELDS = {"w": SPARSE, "mask": torch.arange(30) % 3 == 0, "n": torch.tensor(5)}


@pytest.mark.parametrize("form", PAYLOADS)
@EXAMPLES
def test_a_payload_is_read_or_refused(examples: int, form: str) -> None:
    def read(data: bytes) -> None:
        tensor = decode(data, 10_000)
        assert tensor.numel() <= 10_000
        if torch.equal(decode(encode(tensor)), tensor):
            return
        raise AssertionError("it is not what it says")

    fuzz(read, damaged(PAYLOADS[form]), examples)


@EXAMPLES
def test_a_message_of_fields_is_read_or_refused(examples: int) -> None:
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in FIELDS.items()}
    likes = {name: Like(*like) for name, like in expected.items()}

    def read(data: bytes) -> None:
        for reading in (
            lambda: decode_message(data, 10_000),
            lambda: decode_as(data, expected),
            lambda: open_reply(data, likes),
        ):
            try:
                reading()
            except SympruneError as error:
                refused: SympruneError | None = error
            else:
                refused = None
        if refused:
            raise refused

    fuzz(read, damaged(encode_message(FIELDS)), examples)


def spoilt(data: bytes, chance: random.Random) -> bytes:
    """Bytes changed, put in, taken out or cut off, most of them where sizes and types are."""
    odd = [b"\xff\xff\xff\xff\x07", b"\x80\x80\x80\x80\x08", b"\0", b"\x7f", b"\xff" * 8]
    for _ in range(chance.randint(1, 5)):
        at = min(chance.randrange(len(data) + 1), chance.choice([2, 12, len(data)]))
        new = chance.choice([*odd, bytes([chance.randrange(256)])])
        end = at + chance.choice([0, 1, len(new), chance.randrange(5)])
        data = data[:at] + new * chance.randrange(2) + data[end:]
    return data[: chance.choice([len(data)] * 4 + [chance.randrange(len(data) + 1)])]


def test_thirty_thousand_spoilt_payloads_and_letters_are_read_or_refused() -> None:
    """In one process with little room: what is not refused is small."""
    pruned = messages.write(messages.head(messages.ROUND, 3, 0, 2), {"values": torch.ones(40)})
    header = {"status": "done", "turn": 3, "kind": "turn", "algorithm": "fedavg"}
    letter = Letter(header, (b"abc", b"d" * 40)).pack()
    good = [*PAYLOADS.values(), encode_message(FIELDS), pruned, letter]
    readers = (
        lambda data: decode(data, 10_000),
        lambda data: decode_message(data, 10_000),
        lambda data: unpack(data, 10_000),
        lambda data: messages.read_head(data),
    )
    chance, refused = random.Random(0), 0
    with little_room():
        for number in range(30_000):
            data = spoilt(chance.choice(good), chance)
            assert "\n" not in sentence(data)  # for the audit log; of anything
            try:
                readers[number % len(readers)](data)
            except SympruneError:
                refused += 1
    assert 15_000 < refused < 30_000


@EXAMPLES
def test_a_letter_is_opened_or_refused(examples: int) -> None:
    letter = Letter({"status": "done", "turn": 3, "bits": 64}, (b"abc", b"", b"d" * 40))
    fuzz(lambda data: unpack(data, 10_000), damaged(letter.pack()), examples)

    def read(header: Any) -> None:
        text = json.dumps(header).encode()
        unpack(len(text).to_bytes(4, "little") + text + b"abcd", 10_000)

    fuzz(read, changed({"status": "done", "sizes": [3, 0, 1]}), examples)


@EXAMPLES
def test_settings_of_a_pruning_client_are_read_or_refused(examples: int) -> None:
    needs = Needs(frozenset({SQUARE, MOMENTS}), frozenset({SQUARE}), 3.0)
    good = messages.write_settings(messages.Settings(1, 3, needs, True, 1.5, 0.5))
    fuzz(messages.read_settings, damaged(good), examples)
    alone = messages.Settings(0, 2, needs, aggregate="average", weights=True, recipe=Recipe())
    fuzz(messages.read_settings, damaged(messages.write_settings(alone)), examples)


@dataclass
class Exchange:
    """What a server and its clients said to each other, message by message."""

    asked: list[bytes]
    answered: list[dict[int, bytes]]
    options: dict[str, Any]


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"recipe": Recipe("wanda")},
    "masked": {"recipe": Recipe("wanda"), "secure": True},
    "grams": {"recipe": Recipe("wanda", update="lsq")},
    "masked grams": {"recipe": Recipe("wanda", refine="swap"), "secure": True, "gram_bits": 16},
    "averages": {"recipe": Recipe("wanda", update="lsq"), "aggregate": "average"},
}


@pytest.fixture(scope="module", params=WAYS)
def exchange(request: pytest.FixtureRequest) -> Exchange:
    heard = Exchange([], [], WAYS[request.param])
    clients = [
        Client(families.model(), part, allow_few_tokens=True)
        for part in families.tokens(3, 12).split((1, 2))
    ]

    def send(outgoing: dict[int, bytes]) -> dict[int, bytes]:
        replies = {number: clients[number](data) for number, data in outgoing.items()}
        heard.asked.append(outgoing[0])
        heard.answered.append(replies)
        return replies

    pruning.run(Server(families.model(), clients=2, **heard.options), send)
    return heard


@EXAMPLES
def test_a_pruning_client_answers_or_refuses(examples: int, exchange: Exchange) -> None:
    model, tokens = families.model(), families.tokens(1, 12)
    for number in range(3):

        def answer(data: bytes, before: int = number) -> None:
            client = Client(model, tokens, allow_few_tokens=True)
            for message in exchange.asked[:before]:
                client(message)
            client(data)

        fuzz(answer, damaged(exchange.asked[number]), examples // 4)


def reader(server: Server) -> Callable[[bytes], object]:
    """What reads the next answer of client 0."""
    if server.rounds is not None and server.rounds.sharing:
        return partial(server.rounds.take_shares, 0)
    if server.rounds is not None and server.rounds.unmasking:
        return partial(server.rounds.take_unmask, 0)
    return partial(server._statistics, 0, 0)


@EXAMPLES
def test_a_pruning_server_takes_an_answer_or_leaves_its_sender_out(
    examples: int, exchange: Exchange
) -> None:
    server = Server(families.model(), clients=2, **exchange.options)
    shape = messages.hello_fields(server.secure)
    fuzz(lambda data: messages.read(data, 0, shape), damaged(exchange.answered[0][0]), examples)
    server.welcome(exchange.answered[0])
    for answers in exchange.answered[1:]:
        server.ask(0)
        fuzz(reader(server), damaged(answers[0]), examples // 4)
        if server.take(0, answers):
            break
    assert len(server.members) == 2


def save_with(file: Path, tensors: dict[str, torch.Tensor], about: dict[str, Any]) -> None:
    texts = {}
    for name, said in about.items():
        text = said if isinstance(said, str) else json.dumps(said)
        texts[_encodable(name)] = _encodable(text)
    save_file(tensors, file, texts)


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def fuzz_saved(file: Path, read: Callable[[], object], examples: int) -> None:
    """Damage a safetensors file, what its metadata say, and which tensors it has."""
    whole = file.read_bytes()

    def read_damaged(data: bytes) -> None:
        file.write_bytes(data)
        read()

    fuzz(read_damaged, damaged(whole), examples)
    file.write_bytes(whole)
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        about = opened.metadata()

    def read_changed(change: tuple[Any, str, str]) -> None:
        metadata, left_out, added = change
        kept = {name: tensor for name, tensor in tensors.items() if name != left_out}
        if isinstance(metadata, dict):
            save_with(file, kept | {added: torch.ones(3)}, metadata)
            read()

    names = st.sampled_from([*tensors, "none of them"])
    added = st.sampled_from(["x", "server/x", "client/y", "mask a", "key 0", "hidden", *tensors])
    plain = {name: _plain(said) for name, said in about.items()}
    fuzz(read_changed, st.tuples(changed(plain), names, added), examples)


def _plain(said: str) -> Any:
    try:
        return json.loads(said)
    except ValueError:
        return said


@EXAMPLES
def test_a_snapshot_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    states = {"x": torch.ones(3), "h": torch.zeros(2, 3)}
    history = [{"round": 0, "loss": 1.5}, {"round": 1, "loss": 1.25}]
    ledger = {"up_bytes": torch.tensor([1, 2])}
    snapshot.save(file, snapshot.Snapshot("fedavg", 2, states, states, ledger, history))
    assert snapshot.load(file).turn == 2
    fuzz_saved(file, lambda: snapshot.load(file), examples)


@EXAMPLES
def test_the_state_of_a_training_client_is_read_or_counts_for_nothing(
    examples: int, tmp_path: Path
) -> None:
    file = tmp_path / "state.safetensors"
    record = records.Record(1, 2, {"x": torch.ones(3)}, {"x": torch.zeros(3)}, b"reply")
    records.save_record(file, record)
    loaded = records.load_record(file)
    assert loaded is not None and loaded.reply == b"reply"
    fuzz_saved(file, lambda: records.load_record(file), examples)


@EXAMPLES
def test_the_state_of_a_pruning_client_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    client = Client(
        families.model(), families.tokens(1, 12), folder=tmp_path, allow_few_tokens=True
    )
    server = Server(families.model(), Recipe("wanda"), 1)
    pruning.run(server, lambda sent: {number: client(data) for number, data in sent.items()})
    assert client_state.load(tmp_path).block == 2
    fuzz_saved(tmp_path / client_state.FILE, lambda: client_state.load(tmp_path), examples)


@EXAMPLES
def test_the_state_of_a_pruning_server_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    client = Client(families.model(), families.tokens(1, 12), allow_few_tokens=True)
    server = Server(families.model(), Recipe("wanda"), 1)
    pruning.run(server, lambda sent: {number: client(data) for number, data in sent.items()})
    traffic = {"ledger": torch.zeros(2), "setup": 1, "blocks": [2]}
    server_state.save(file, server, 1, traffic)
    fresh = Server(families.model(), Recipe("wanda"), 1)
    assert server_state.blocks_done(file)

    def read() -> None:
        assert server_state.blocks_done(file) >= 0
        server_state.restore(file, fresh)

    fuzz_saved(file, read, examples // 2)


@EXAMPLES
def test_a_training_job_is_read_or_refused(examples: int) -> None:
    problem = {"data": "digits", "clients": 3, "l2": 0.1, "split": "iid"}
    job = TrainingJob("fedavg", {"gamma": 0.1, "p": 0.5}, problem, rounds=2, seed=5)
    inputs = changed_json(json.loads(job.to_json()))
    fuzz(lambda data: job_from_json(data.decode("latin-1")), inputs, examples)


@EXAMPLES
def test_a_pruning_task_is_read_or_refused(examples: int) -> None:
    task = Task("tiny", Recipe("wanda"), 3, True, Privacy(1.0), revision="main")
    inputs = changed_json(json.loads(task.to_json()))
    fuzz(lambda data: Task.from_json(data.decode("latin-1")), inputs, examples)


@EXAMPLES
def test_a_plan_to_compare_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    entry = {"algorithm": "fedavg", "gamma": 0.1, "tune": {"p": [0.1, 0.5]}, "label": "tuned"}
    plan = {"algorithms": ["gd", entry], "problem": {"data": "digits", "clients": 3}, "rounds": 2}
    plan |= {"seeds": [0, 1], "targets": [0.5], "evaluate_every": 1}

    def read(data: bytes) -> None:
        file.write_bytes(data)
        read_plan(file)

    read(json.dumps(plan).encode())
    fuzz(read, changed_json(plan) | damaged(yaml.safe_dump(plan).encode()), examples)


@EXAMPLES
def test_what_a_client_knows_of_its_sums_is_read_or_refused(examples: int, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    file = tmp_path / "a.sums.json"
    save_session(file, Session(2, Party.enter(0, Trust()), 5, "of this letter"))
    good = file.read_bytes()

    def read(data: bytes) -> None:
        file.write_bytes(data)
        load_session(file)

    fuzz(read, damaged(good), examples)
    fuzz(lambda plain: read(json.dumps(plain).encode()), changed(json.loads(good)), examples)
