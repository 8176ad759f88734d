"""Two hundred nodes and a server, with a tenth of the nodes dead, late or hostile in every round
and the others repeating themselves: the model is that of the honest ones, bit for bit. Where the
hostile ones tell lies that look like replies, it is what the rules for that promise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from symprune.fed.protocol import Turn
from symprune.fed.remote.job import TrainingJob
from symprune.fed.remote.loop import Outcome
from symprune.fed.remote.replies import deliveries
from symprune.fed.remote.server import serve
from symprune.fed.robust import DEPLOYED
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

    def __init__(self, silent: bool, liars: bool = False) -> None:
        self.silent, self.liars, self.before = silent, liars, dict[int, bytes]()

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
        message = algorithm.client_step({}, received, problem, turn)[1]
        if self.liars and not self.silent:
            message = {
                name: together(rows, received["x"], number) for name, rows in message.items()
            }
        parcel = Parcel(message, NODES, reply=True)
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
        how = None if self.liars else way(number, client)
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


def together(rows: Tensor, x: Tensor, number: int) -> Tensor:
    """The liars of a round agree on one reply: a model that goes the other way as far as makes the
    mean go back, and that is no farther off than replies may be."""
    liars = torch.tensor([way(number, client) is not None for client in range(NODES)])
    start = x if x.dim() == 1 else x[0]
    step = rows[~liars].mean(0) - start
    return torch.where(liars.unsqueeze(1), start - 12 * step, rows)


def run(
    folder: Path, silent: bool, liars: bool = False, robust: str = DEPLOYED, rounds: int = ROUNDS
) -> Outcome:
    problem = {"data": "digits", "clients": NODES}
    job = TrainingJob("fedavg", {"p": 0.5, "gamma": 0.1}, problem, rounds, robust=robust)
    return serve(job, Crowd(silent, liars), folder, pause=0)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What the nodes that are no liars train without the others."""
    return run(tmp_path_factory.mktemp("honest"), True)


def test_the_model_is_that_of_the_honest_nodes(honest: Outcome, tmp_path: Path) -> None:
    """Who repeats itself is honest, and counts once."""
    with_them, without = run(tmp_path, False), honest
    assert [record["replies"] for record in with_them.history[1:]] == [NODES - NODES // 10] * ROUNDS
    assert torch.equal(with_them.model, without.model)
    assert with_them.history[-1]["loss"] < 0.9 * with_them.history[0]["loss"]


def losses(outcome: Outcome) -> tuple[float, float]:
    return outcome.history[0]["loss"], outcome.history[-1]["loss"]


def test_by_default_lies_within_the_bound_spoil_the_model(honest: Outcome, tmp_path: Path) -> None:
    """Or the tests below would show nothing."""
    outcome = run(tmp_path, False, liars=True, rounds=5)
    assert all(record["replies"] == NODES for record in outcome.history[1:])
    assert losses(outcome)[1] > losses(outcome)[0] > losses(honest)[1]


@pytest.mark.parametrize(
    ("robust", "lost"),
    [
        ("krum:20", 0.1),
        pytest.param("trimmed:0.1", 0.5, marks=pytest.mark.slow),
        pytest.param("geometric-median", 0.4, marks=pytest.mark.slow),
    ],
)
def test_with_a_rule_for_it_the_model_gains_what_the_rule_leaves_it(
    robust: str, lost: float, honest: Outcome, tmp_path: Path
) -> None:
    """Krum leaves the liars out. The others stay near the honest replies' middle, which is off
    their mean where the nodes' data differ."""
    outcome = run(tmp_path, False, liars=True, robust=robust)
    start, end = losses(honest)
    assert losses(outcome)[1] - end < lost * (start - end)
