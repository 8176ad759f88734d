"""An active server of secure pruning: different stories for different clients, and second runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import families
import pytest
import torch

from symprune.errors import SympruneError
from symprune.fed.pruning import Client, Privacy, Server, messages, remote
from symprune.fed.pruning.messages import GRAMS, HELLO, ROUND
from symprune.fed.wire.payload import decode_message, encode_message
from symprune.recipe import Recipe

pytest.importorskip("cryptography")
CLIENTS = 3
PARTS = [families.tokens(3, 12, seed) for seed in (1, 2, 3)]
Lie = Callable[[int, bytes], bytes]


def federation(folder: Path | None = None) -> dict[int, Client]:
    return {
        n: Client(families.model(), PARTS[n], secure=True,
                  folder=None if folder is None else folder / str(n))
        for n in range(CLIENTS)
    }  # fmt: skip


def run(server: Server, clients: dict[int, Client], lie: Lie = lambda _, data: data) -> None:
    """All of a run, with what client 0 is told as it is and the others' messages changed."""

    def tell(data: dict[int, bytes]) -> dict[int, bytes]:
        return {n: clients[n](lie(n, sent) if n else sent) for n, sent in data.items()}

    server.welcome(tell(server.hello()))
    for block in range(len(server.layout.blocks)):
        while not server.take(block, tell(server.ask(block))):
            pass
    tell(server.finish())


def changing(kind: int, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Lie:
    """Another value of a field, where messages of this kind have it."""

    def lie(_: int, data: bytes) -> bytes:
        fields = decode_message(data)
        if messages.read_head(data)[1] == kind and name in fields:
            fields[name] = change(fields[name])
        return encode_message(fields)

    return lie


def keep_nothing(_: int, data: bytes) -> bytes:
    """Of the first matrix, where there are masks; of what it keeps no weight then."""
    fields = decode_message(data)
    if "mask0" in fields:
        fields["mask0"] = torch.zeros_like(fields["mask0"])
        fields["values0"] = fields["values0"][:0]
    return encode_message(fields)


NOISY = {"privacy": Privacy(8.0, honest=1), "reference": families.tokens(2, 12)}
STORIES: dict[str, tuple[str, Lie]] = {
    "masks that keep nothing": ("lsq", keep_nothing),
    "weights of the server's own": ("lsq", changing(ROUND, "values0", lambda kept: kept * 1e6)),
    "lengths that round the others away": ("lsq", changing(GRAMS, "scale", lambda s: s * 1e9)),
    "another centre": ("noise", changing(ROUND, "centre", lambda centre: centre + 1)),
    "another unit": ("noise", changing(ROUND, "scale", lambda scale: scale * 2)),
    "less noise": ("noise", changing(HELLO, "bounds", lambda b: b * torch.tensor([0.5, 1, 1]))),
}


@pytest.mark.parametrize("story", STORIES)
def test_clients_that_are_told_different_things_unmask_nothing(story: str) -> None:
    """Their sum would be the statistics of client 0 beside numbers that the server knows."""
    how, lie = STORIES[story]
    recipe = Recipe(update="lsq") if how == "lsq" else Recipe()
    server = Server(families.model(), recipe, CLIENTS, secure=True,
                    **(NOISY if how == "noise" else {}))  # fmt: skip
    with pytest.raises(SympruneError, match="has not agreed to who takes part"):
        run(server, federation(), lie)


def test_an_honest_server_tells_one_story() -> None:
    run(Server(families.model(), Recipe(update="lsq"), CLIENTS, secure=True), federation())


def test_a_second_run_in_the_folder_of_a_finished_one_is_refused(tmp_path: Path) -> None:
    """{A, B, C} of one run minus {A, B} of the next are the statistics of C."""
    run(Server(families.model(), Recipe(), CLIENTS, secure=True), federation(tmp_path))
    again = Server(families.model(), Recipe(), CLIENTS, secure=True)
    for number, client in federation(tmp_path).items():
        with pytest.raises(SympruneError, match="asked to start over: out of two secure sums"):
            client(again.hello()[number])
    plain = Server(families.model(), Recipe(), CLIENTS).hello()[0]
    own = Client(families.model(), PARTS[0], folder=tmp_path / "0", allow_few_tokens=True)
    with pytest.raises(SympruneError, match="asked to start over"):
        own(plain)


def test_a_run_that_summed_nothing_may_begin_again(tmp_path: Path) -> None:
    first = Server(families.model(), Recipe(), CLIENTS, secure=True)
    for number, client in federation(tmp_path).items():
        client(first.hello()[number])
    again = federation(tmp_path)
    assert all(again[n](data) for n, data in first.hello().items())


def test_a_policy_made_for_a_secure_task_asks_for_two_thirds_of_its_clients() -> None:
    task = remote.Task("model", Recipe(), 10, secure=True)
    assert task.policy({}).least_clients == 7
    assert replace(task, clients=2).policy({}).least_clients == 2
    assert replace(task, clients=1, secure=False).policy({}).least_clients == 1
