"""Two hundred nodes and a server, with a tenth of the nodes dead, late or hostile in every round
and the others repeating themselves: the model is that of the honest ones, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from symprune.fed.protocol import Turn
from symprune.fed.remote.job import TrainingJob
from symprune.fed.remote.loop import Outcome
from symprune.fed.remote.replies import deliveries
from symprune.fed.remote.server import serve
from symprune.fed.wire.envelope import Letter, unpack
from symprune.fed.wire.parcel import Parcel, collect
from symprune.fed.wire.payload import decode_message, encode_message

NODES, ROUNDS = 200, 20
WAYS = ("dead", "late", "huge", "garbage", "another's", "another round's", "not finite")


def way(number: int, client: int) -> str | None:
    """What a client does wrong in a round; a tenth do, others in each round."""
    wrong = (client + number) % 10 == 3
    return WAYS[(number + client // 10) % len(WAYS)] if wrong else None


def changed(data: bytes, factor: float) -> bytes:
    letter = unpack(data)
    fields = decode_message(letter.parts[0])
    body = encode_message({name: value * factor for name, value in fields.items()})
    return Letter(letter.header, (body, *letter.parts[1:])).pack()


def not_finite(data: bytes) -> bytes:
    letter = unpack(data)
    body = bytearray(letter.parts[0])
    body[-4:] = b"\x00\x00\xc0\x7f"
    return Letter(letter.header, (bytes(body),)).pack()


class Crowd:
    """Nodes that compute as one stack and write a letter each; some misbehave, or say nothing at
    all where they would."""

    clients = NODES

    def __init__(self, silent: bool) -> None:
        self.silent, self.before = silent, dict[int, bytes]()

    def connected(self) -> set[int]:
        return set(range(NODES))

    def exchange(self, letters: Mapping[int, bytes]) -> dict[int, bytes]:
        first = unpack(letters[0])
        job = TrainingJob(**{k: first.header[k] for k in ("algorithm", "options", "problem")})
        problem = job.whole_problem()
        if first.header["kind"] == "describe":
            told = {"status": "described", "L": None, "mu": None, "own": False, "rows": 1}
            return dict.fromkeys(letters, Letter({**told, "dimension": problem.dimension}).pack())
        number, algorithm = first.header["turn"], job.build_algorithm()
        turn = Turn(number, 0, NODES, torch.arange(NODES))
        received = collect([unpack(data).parts[0] for data in letters.values()])
        parcel = Parcel(algorithm.client_step({}, received, problem, turn)[1], NODES, reply=True)
        header = {"status": "done", "turn": number, "bits": 1}
        replies = {i: Letter(header, (parcel.encode(i),)).pack() for i in range(NODES)}
        there = [i for i in replies if not (self.silent and way(number, i))]
        came = [part for i in there for part in self.deliver(number, i, replies)]
        self.before = replies
        asked = {str(i): i for i in letters}
        return deliveries(asked, came, {1000 + i: i for i in range(NODES)})

    def deliver(
        self, number: int, client: int, replies: dict[int, bytes]
    ) -> list[tuple[str, int, bytes]]:
        """What arrives: to which letter, from which node, which bytes."""
        right = (str(client), 1000 + client, replies[client])
        how = way(number, client)
        other = next(i for i in replies if i != client)
        wrong = {
            "dead": [],
            "late": [(f"the letter before of {client}", *right[1:])],
            "huge": [(*right[:2], changed(replies[client], 1e30))],
            "garbage": [(*right[:2], bytes(reversed(replies[client])))],
            "another's": [(str(other), 1000 + client, replies[client])],
            "another round's": [(*right[:2], self.before.get(client, b""))],
            "not finite": [(*right[:2], not_finite(replies[client]))],
        }
        return [right, right] if how is None else wrong[how]


def run(folder: Path, silent: bool) -> Outcome:
    problem = {"data": "digits", "clients": NODES}
    job = TrainingJob("fedavg", {"p": 0.5, "gamma": 0.1}, problem, ROUNDS)
    return serve(job, Crowd(silent), folder, pause=0)


def test_the_model_is_that_of_the_honest_nodes(tmp_path: Path) -> None:
    """Who repeats itself is honest, and counts once."""
    with_them, without = run(tmp_path / "a", False), run(tmp_path / "b", True)
    assert [record["replies"] for record in with_them.history[1:]] == [NODES - NODES // 10] * ROUNDS
    assert torch.equal(with_them.model, without.model)
    assert with_them.history[-1]["loss"] < 0.9 * with_them.history[0]["loss"]
