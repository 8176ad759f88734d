"""The seam between a federated protocol and the engine that carries it.

A protocol is a server loop that hands bytes for numbered clients to a `Transport` and gets replies
in the order of the clients' numbers, and a client function from bytes to bytes with a folder of its
own. `flower.py` carries them over Flower; `LocalTransport` calls the clients here, one by one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from symprune.errors import SympruneError
from symprune.fed.wire.envelope import unpack
from symprune.machine.patience import stretched

log = logging.getLogger("symprune.fed")
Setting = str | int | float | bool


@dataclass(frozen=True)
class Node:
    """A client's own machine: its number, its folder, and what its owner has set there."""

    number: int
    folder: Path
    config: Mapping[str, Setting] = field(default_factory=dict)

    @property
    def lock(self) -> Path:
        """What whoever answers a letter holds meanwhile: two at once would read one state."""
        return self.folder / "lock"


Answer = Callable[[bytes, Node], bytes]


def refusal_in(reply: bytes) -> str | None:
    """Why a client says that it does not take part; None of any other bytes."""
    try:
        header = unpack(reply).header
    except SympruneError:  # what a pruning client says is no letter
        return None
    return str(header.get("reason")) if header.get("status") == "error" else None


class Transport(Protocol):
    """How a server reaches its clients, numbered from 0."""

    clients: int

    def connected(self) -> set[int]:
        """The clients that can be reached now."""

    def exchange(self, letters: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send each client its bytes; the replies that came, by ascending number. Who is killed,
        too slow or not who it says it is, is left out and named in the log."""


def wait_for_all(transport: Transport, tries: int, pause: float) -> None:
    """Until every client is connected, at most so many pauses: nodes take a while to come back
    after a crash, and a run that goes on at once would go on without them."""
    for _ in range(tries):
        if len(transport.connected()) == transport.clients:
            return
        time.sleep(stretched(pause))
    missing = sorted(set(range(transport.clients)) - transport.connected())
    if missing:
        log.warning("Clients %s are not connected; the run begins without them.", missing)


class LocalTransport:
    """All clients in this process, each with a folder below `folder`."""

    def __init__(self, answer: Answer, clients: int, folder: Path) -> None:
        self.answer, self.clients, self.folder = answer, clients, folder

    def node(self, number: int) -> Node:
        return Node(number, self.folder / f"client-{number}")

    def connected(self) -> set[int]:
        return set(range(self.clients))

    def exchange(self, letters: Mapping[int, bytes]) -> dict[int, bytes]:
        return {i: self.answer(letters[i], self.node(i)) for i in sorted(letters)}
