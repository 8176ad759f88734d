"""Clients in one process as if they were on machines of their own, and accidents on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from symprune.fed.protocol import State
from symprune.fed.remote.client import answer
from symprune.fed.remote.job import TrainingJob
from symprune.fed.remote.loop import Outcome
from symprune.fed.remote.records import client_state
from symprune.fed.remote.server import serve
from symprune.fed.remote.transport import LocalTransport

CLIENTS = 4
PROBLEM = {"data": "digits", "split": "class:2", "clients": CLIENTS, "l2": 0.1}
# The noise of ldp-fedp3 must come from the clients' machines, so its bits are nobody else's.
OPTIONS: dict[str, dict[str, Any]] = {"ldp-fedp3": {"epsilon": None}}


def job(name: str, rounds: int = 2, **options: Any) -> TrainingJob:
    return TrainingJob(name, {**OPTIONS.get(name, {}), **options}, PROBLEM, rounds)


class Network(LocalTransport):
    """Clients in this process, and a place where things happen to them: `before` a letter is
    delivered and `after` it was answered. The first exchange, number -1, is the introduction."""

    def __init__(
        self,
        folder: Path,
        before: Callable[[int, int], bool] = lambda number, client: True,
        after: Callable[[int, int, bytes], bytes | None] = lambda number, client, reply: reply,
    ) -> None:
        super().__init__(answer, CLIENTS, folder)
        self.before, self.after, self.number = before, after, -2

    def exchange(self, letters: Mapping[int, bytes]) -> dict[int, bytes]:
        self.number += 1
        out = {}
        for client in sorted(letters):
            if self.before(self.number, client):
                reply = self.after(
                    self.number, client, self.answer(letters[client], self.node(client))
                )
                if reply is not None:
                    out[client] = reply
        return out


def run(task: TrainingJob, folder: Path, **events: Any) -> Outcome:
    return serve(task, Network(folder / "clients", **events), folder / "server", pause=0)


def states(folder: Path, outcome: Outcome) -> State:
    """The clients' states on their disks, as one stack."""
    rows = [
        client_state(folder / "clients" / f"client-{i}", outcome.run, int(counted))
        for i, counted in enumerate(outcome.counted)
    ]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
