"""Whether a process is there yet."""

from __future__ import annotations

import socket
from pathlib import Path

from symprune.errors import SympruneError


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
