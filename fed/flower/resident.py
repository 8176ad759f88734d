"""A client's process that stays: what answers letters imports torch and reads its data once.

Flower starts a process for every message. That one stays small; it hands the letter to a process of
the same node and user through a socket in the node's folder, and starts it where there is none. The
one that stays ends with its SuperNode. What it answers is what a new process would, to the bit: all
that lasts is on the disk, and between letters it keeps nothing but data and code.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import psutil

from symprune.errors import SympruneError
from symprune.fed.remote.transport import Answer, Node
from symprune.machine.lock import alone
from symprune.machine.patience import stretched

LOG = "resident.log"  # in the node's folder, with the socket
LONGEST = 100  # bytes of a socket's path, which systems bound
START = 120.0  # seconds until it listens: torch and the algorithms are imported
LOOK = 1.0  # seconds between two looks at whether its SuperNode is there
PARENT = "flower-supernode"
DONE, REFUSED, FAILED = b"0", b"1", b"2"


def resident(module: str) -> Answer:
    """A client that has its letters answered by `module` in a process that stays."""

    def answer(data: bytes, node: Node) -> bytes:
        place = socket_of(node.folder, module)
        if len(os.fsencode(place)) > LONGEST:
            return _answer_of(module)(data, node)
        about = {"number": node.number, "folder": str(node.folder), "config": dict(node.config)}
        for _ in range(2):  # it may end between two letters; what was answered is on the disk
            with _connected(place, module) as connection, suppress(ConnectionError):
                _send(connection, json.dumps(about).encode())
                _send(connection, data)
                said = _receive(connection)
                if said:
                    return _read(said)
        raise SympruneError(f"The client's process ended, see {node.folder / LOG}.")

    return answer


def socket_of(folder: Path, module: str) -> Path:
    """Another version of the code, or another job, is another process."""
    what = f"{module} {version('symprune')} {sys.executable}"
    return folder.resolve() / f"resident-{hashlib.sha256(what.encode()).hexdigest()[:8]}"


def _read(said: bytes) -> bytes:
    kind, content = said[:1], said[1:]
    if kind == REFUSED:
        raise SympruneError(content.decode())
    if kind == FAILED:
        raise RuntimeError(content.decode())
    return content


@contextmanager
def _connected(place: Path, module: str) -> Iterator[socket.socket]:
    """A connection to the process, which is started if nobody listens; one caller at a time."""
    with alone(place.with_name(f"{place.name}.lock")), socket.socket(socket.AF_UNIX) as connection:
        if connection.connect_ex(str(place)) != 0:
            _start(place, module)
            connection.connect(str(place))
        yield connection


def _start(place: Path, module: str) -> None:
    log = place.with_name(LOG)
    command = [sys.executable, "-m", __name__, module, str(place), str(_supernode())]
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as out:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            umask=0o077,
        )  # fmt: skip
    end = time.monotonic() + stretched(START)
    while started.poll() is None and time.monotonic() < end:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(place)) == 0:
                return
        time.sleep(0.1)
    started.kill()
    raise SympruneError(f"The client's process did not start, see {log}.")


def _supernode() -> int:
    """The process that this one is to end with: the node's SuperNode, or who started it."""
    above = psutil.Process().parents()
    for process in above:
        with suppress(psutil.Error):
            if any(PARENT in word for word in process.cmdline()):
                return process.pid
    return above[0].pid if above else os.getpid()


def stay(module: str, place: Path, parent: int) -> None:
    """Answer letters one by one for as long as the parent is there."""
    with suppress(psutil.Error):
        watched = psutil.Process(parent)
        answer = _answer_of(module)
        place.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(place))
            door.listen()
            door.settimeout(LOOK)
            while watched.is_running() and watched.status() != psutil.STATUS_ZOMBIE:
                with suppress(TimeoutError, ConnectionError):
                    connection, _ = door.accept()
                    with connection:
                        connection.settimeout(None)
                        _serve(connection, answer)
    place.unlink(missing_ok=True)


def _serve(connection: socket.socket, answer: Answer) -> None:
    about = _receive(connection)
    if not about:  # somebody looked whether it is there
        return
    told, data = json.loads(about), _receive(connection)
    node = Node(told["number"], Path(told["folder"]), told["config"])
    try:
        said = DONE + answer(data, node)
    except SympruneError as error:
        said = REFUSED + str(error).encode()
    except Exception as error:  # Flower tells the server, as of a process of its own
        said = FAILED + f"{type(error).__name__}: {error}".encode()
    _send(connection, said)


def _answer_of(module: str) -> Answer:
    found: Answer = importlib.import_module(module).answer
    return found


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(8, "big") + data)


def _receive(connection: socket.socket) -> bytes:
    """One string of bytes; nothing where the other side says nothing at all."""
    head = _exactly(connection, 8)
    if not head:
        return b""
    size = int.from_bytes(head, "big")
    data = _exactly(connection, size)
    if len(head) < 8 or len(data) < size:
        raise ConnectionError
    return data


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        more = connection.recv(min(size - len(found), 1 << 20))
        if not more:
            break
        found += more
    return bytes(found)


if __name__ == "__main__":
    stay(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
