"""Whether a process is there yet, and how long to wait for it on a machine that has other work."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from symprune.errors import SympruneError


def stretched(seconds: float) -> float:
    """So long on an idle machine, and as much longer as this one has more work than processors."""
    try:
        busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        busy = 1.0
    return seconds * min(max(1.0, busy), 10.0)


def says(log: Path, since: int, words: bytes) -> bool:
    """Whether a log has the words behind the byte `since`."""
    return words in log.read_bytes()[since:]


def listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        try:
            return probe.connect_ex((host, port)) == 0
        except (OSError, UnicodeError) as error:
            raise SympruneError(f"There is no machine called {host!r}: {error}.") from error
