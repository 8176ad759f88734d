"""The rounds of a federation as its server sees them: its state, and what changes it.

Whoever replies is counted, a broadcast that was missed is repeated, and a client that lost its disk
gets back what the server could follow.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from symprune.errors import Diverged, SympruneError
from symprune.fed import snapshot as disk
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.models.lora import about_adapters
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Algorithm, State, Turn, check
from symprune.fed.remote.job import TrainingJob, identity
from symprune.fed.remote.replies import Counted, count
from symprune.fed.remote.transport import Transport
from symprune.fed.robust import Usual
from symprune.fed.simulate import Record
from symprune.fed.wire.envelope import Letter, unpack
from symprune.fed.wire.ledger import Ledger
from symprune.fed.wire.parcel import Parcel, collect
from symprune.fed.wire.payload import encode_message
from symprune.machine import durable
from symprune.machine.patience import stretched

log = logging.getLogger("symprune.fed")
PATIENCE = 20  # times a round is tried when nobody, or not everyone who must, replies


@dataclass
class Outcome:
    """What a run leaves at the server."""

    run: str
    algorithm: Algorithm
    server: State
    memory: State  # what it knows of the clients' states, one row each
    counted: Tensor  # the last turn of every client that counted, -1 for none
    ledger: Ledger
    history: list[Record]
    layout: FlatLayout

    @property
    def model(self) -> Tensor:
        """All weights of the model: those that masks prune are zero."""
        return self.layout.scatter(self.algorithm.model(self.server))

    def write(self, folder: Path, problem: Problem) -> None:
        """The model by its tensors' names and the history, for people and programs."""
        parts = self.layout.split(self.model)
        tensors = {name: tensor.contiguous().clone() for name, tensor in parts.items()}
        durable.write_tensors(folder / "model.safetensors", tensors, about_adapters(problem.loss))
        content = {"algorithm": repr(self.algorithm), "problem": problem.name}
        bill = self.ledger.bill(self.history[-1]["round"] if self.history else 0)
        text = json.dumps({**content, "bill": bill, "history": self.history}, indent=1)
        durable.write_text(folder / "history.json", text)


def write_about(job: TrainingJob, client: int, header: dict[str, Any], *parts: bytes) -> bytes:
    """A letter that says all a client needs to know, whatever it has forgotten."""
    about = {"algorithm": job.algorithm, "options": job.options, "problem": job.problem}
    about |= {"private": job.private} if job.private else {}
    return Letter({**about, "seed": job.seed, "client": client, **header}, parts).pack()


class Loop:
    """The server's state and the rounds that change it."""

    def __init__(
        self, run: str, job: TrainingJob, problem: Problem, transport: Transport, pause: float
    ) -> None:
        self.run, self.job, self.problem = run, job, problem
        self.transport, self.pause = transport, pause
        self.algorithm = job.build_algorithm().located(problem.layout)
        self.defence = job.defence
        self.usual: Usual = {}
        self.catches_up = type(self.algorithm).listen is not Algorithm.listen
        self.owed: dict[int, tuple[int, bytes]] = {}  # broadcasts that may not have been heard
        self.listened: set[int] = set()  # whose memory has heard this turn, if it is tried again

    def begin(self, file: Path) -> None:
        """The checkpoint's state, or the algorithm's first."""
        n = self.job.clients
        everyone = Turn(0, self.job.seed, n, torch.arange(n))
        if file.exists():
            state = disk.load(file)
            check(state.run == self.run, f"{file} belongs to another run.")
            self.turn, self.server, self.history = state.turn, state.server, state.history
            self.ledger, self.usual = Ledger(**state.ledger), state.usual
            kept = state.client
            self.counted = kept.pop("counted")
            names = [name for name in kept if name.startswith("owed.")]
            self.owed = {
                int(name.split(".")[1]): (int(name.split(".")[2]), kept.pop(name).numpy().tobytes())
                for name in names
            }
            self.memory = kept
            return
        self.turn, self.history = 0, []
        self.server = self.algorithm.server_init(self.problem.initial(self.job.seed), everyone)
        self.memory = dict(self.algorithm.memory(self.server, everyone))
        self.counted = torch.full((n,), -1)
        self.ledger, self.usual = Ledger.empty(n), {}

    def save(self, file: Path) -> None:
        owed = {
            f"owed.{client}.{turn}": torch.from_numpy(np.frombuffer(body, np.uint8).copy())
            for client, (turn, body) in self.owed.items()
        }
        kept = {**self.memory, "counted": self.counted, **owed}
        snapshot = disk.Snapshot(
            self.run, self.turn, self.server, kept, self.ledger.state(), self.history, self.usual
        )
        disk.save(file, snapshot)

    def outcome(self) -> Outcome:
        return Outcome(
            self.run,
            self.algorithm,
            self.server,
            self.memory,
            self.counted,
            self.ledger,
            self.history,
            self.problem.layout,
        )

    def one_round(self) -> None:
        """Broadcast, wait, count, step."""
        turn = Turn(self.turn, self.job.seed, self.job.clients, torch.arange(self.job.clients))
        self.listened = set()
        for attempt in range(PATIENCE):
            if attempt:
                time.sleep(stretched(self.pause))
            counted, bodies, needed = self._exchange(turn)
            if len(counted.clients) >= needed:
                break
            log.warning("Round %s: %s replies count.", turn.number, len(counted.clients))
        else:
            raise SympruneError(
                f"Round {turn.number} was tried {PATIENCE} times without the replies it needs."
            )
        about = turn.about(counted.clients)
        server = self.algorithm.server_step(self.server, counted.received, about)
        if not bool(torch.isfinite(self.algorithm.model(server)).all()):
            raise Diverged(f"{self.algorithm.name} diverged in round {turn.number}")
        self._follow_work(counted, bodies, turn)
        self.server = server
        self.ledger.up(counted.clients, counted.sizes, counted.bits)
        self.counted[counted.clients] = turn.number
        self.turn += 1

    def _exchange(self, turn: Turn) -> tuple[Counted, dict[int, bytes], int]:
        """The letters of a turn: the replies that count, the bodies that were sent, and how many
        replies the turn needs. Who missed a broadcast only catches up this time."""
        algorithm, here = self.algorithm, self.transport.connected()
        wanted = algorithm.cohort(self.server, turn)
        workers = {i for i in wanted.tolist() if i in here and i not in self.owed}
        cohort = torch.tensor(sorted(workers), dtype=torch.int64)
        recipients = torch.cat([cohort, algorithm.listeners(self.server, turn)]).unique()
        bodies = self._broadcast(recipients, turn, here)
        letters = {i: (turn.number, body, i in workers) for i, body in bodies.items()}
        letters |= {i: (*self.owed[i], False) for i in self.owed}
        replies = self._send({i: letters[i] for i in letters if i in here})
        heard = {i for i, data in replies.items() if status_of(data) in ("done", "heard")}
        self._follow_listening({i: letters[i] for i in heard - self.listened}, turn)
        if self.catches_up:
            missed = {i: letters[i][:2] for i in letters if i not in heard}
            self.owed = dict(sorted(missed.items()))
        counted = count(
            algorithm,
            self.server,
            {i: replies[i] for i in replies if i in workers},
            turn,
            self.defence,
            self.usual,
        )
        return counted, bodies, len(wanted) if algorithm.needs_everyone(turn) else 1

    def _broadcast(self, recipients: Tensor, turn: Turn, here: set[int]) -> dict[int, bytes]:
        """Every recipient's encoded message, entered in the ledger for those who can be reached."""
        if not len(recipients):
            return {}
        message = self.algorithm.broadcast(self.server, turn.about(recipients))
        parcel = Parcel(message, len(recipients), reply=False)
        rows = torch.tensor([row for row, i in enumerate(recipients.tolist()) if i in here]).long()
        self.ledger.down(recipients[rows], parcel.sizes()[rows], parcel.bits()[rows])
        for client, (_, body) in self.owed.items():
            self.ledger.down_bytes[client] += len(body) if client in here else 0
        return {int(i): parcel.encode(row) for row, i in enumerate(recipients)}

    def _send(self, letters: dict[int, tuple[int, bytes, bool]]) -> dict[int, bytes]:
        """Send, and once more with its state to whoever says that it lost it."""
        packed = {i: self._letter(i, *letter) for i, letter in letters.items()}
        replies = self.transport.exchange(packed)
        lost = [i for i, data in replies.items() if status_of(data) == "lost"]
        if not lost:
            return replies
        log.warning("Clients %s lost their state and get it back.", lost)
        again = {i: self._letter(i, *letters[i], self._encode_memory(i)) for i in lost}
        replies = {i: data for i, data in replies.items() if i not in lost}
        return dict(sorted((replies | self.transport.exchange(again)).items()))

    def _letter(self, client: int, turn: int, body: bytes, work: bool, *memory: bytes) -> bytes:
        header = {"kind": "turn", "turn": turn, "counted": int(self.counted[client]), "work": work}
        return self._letter_of(client, header, body, *memory)

    def _letter_of(self, client: int, header: dict[str, Any], *parts: bytes) -> bytes:
        """A letter of this run."""
        about = {"run": self.run, "n": self.job.clients, **identity(self.problem)}
        return write_about(self.job, client, {**about, **header}, *parts)

    def _encode_memory(self, client: int) -> bytes:
        return encode_message({name: rows[client] for name, rows in self.memory.items()})

    def _follow_listening(self, letters: dict[int, tuple[int, bytes, bool]], turn: Turn) -> None:
        """Follow what `listen` did to the clients that got these letters."""
        self.listened |= letters.keys()
        for client, (number, body, _) in letters.items() if self.catches_up else ():
            who = torch.tensor([client])
            rows = {name: state[who] for name, state in self.memory.items()}
            about = Turn(number, turn.seed, turn.n, who)
            self._remember(who, self.algorithm.listen(rows, collect([body]), about))

    def _follow_work(self, counted: Counted, bodies: dict[int, bytes], turn: Turn) -> None:
        """Follow what `client_step` did to the clients whose replies count."""
        for row, client in enumerate(counted.clients.tolist() if self.memory else ()):
            who = torch.tensor([client])
            reply = {name: values[row : row + 1] for name, values in counted.received.items()}
            rows = {name: state[who] for name, state in self.memory.items()}
            received = collect([bodies[client]])
            self._remember(who, self.algorithm.follow(rows, received, reply, turn.about(who)))

    def _remember(self, who: Tensor, rows: State) -> None:
        self.memory = {k: v.index_copy(0, who, rows[k]) for k, v in self.memory.items()}

    def measure(self, own: bool) -> Record:
        """One more entry of the history: the test set's score, the loss if the server can know
        it, who replied, and the bytes."""
        model = self.algorithm.model(self.server)
        record: Record = {"round": self.turn}
        if not own:
            record["loss"] = self.problem.mean_value(model)
        record |= self.problem.evaluate(model)
        record["replies"] = int((self.counted == self.turn - 1).sum()) if self.turn else 0
        self.history.append({**record, **self.ledger.totals()})
        return self.history[-1]


def status_of(data: bytes) -> Any:
    try:
        return unpack(data).header.get("status")
    except SympruneError:
        return None
