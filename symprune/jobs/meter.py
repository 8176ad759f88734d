"""What a long run shows: where it is, how fast, how long yet, and what memory it takes.

A `Meter` hears every step of the walk, keeps the figures, and writes them as JSON lines: one when a
stage begins, one at every matrix that is masked and every block that is done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from symprune.errors import SympruneError
from symprune.machine import memory

LOG = b'{"time": '  # how a log begins: no other file is added to
Show = Callable[[dict[str, Any]], None]


class Meter:
    """Figures of a run as it goes on; call it as the engine's `watch`. `show` gets them all."""

    def __init__(
        self, seqlen: int, log: Path | None = None, show: Show = lambda figures: None
    ) -> None:
        self.seqlen = seqlen
        self.show = show
        self.begun = time.monotonic()
        self.tokens = 0
        self.measuring = 0.0
        self.figures: dict[str, Any] = {}
        self._first: tuple[float, int] | None = None
        self._before: tuple[str, int] | None = None
        self._since = self.begun
        self._log = _open(log) if log else None

    def __call__(
        self, stage: str, block: int, blocks: int, done: int, total: int, layer: str = ""
    ) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, block)
        begins = (stage, block) != self._before
        if stage in ("collect", "advance"):
            if begins:
                self._since = now
            self.tokens += self.seqlen
            self.measuring += now - self._since
            self._since = now
        self._before = (stage, block)
        self.figures = {
            "time": round(now - self.begun, 3),
            "stage": stage,
            "block": block + 1,
            "blocks": blocks,
            "done": done,
            "of": total,
            "layer": layer,
            "tokens_per_second": self.speed(),
            "seconds_left": self.left(now, stage, block, blocks),
            "memory_bytes": memory.now(),
            "peak_memory_bytes": memory.peak(),
        }
        if begins or layer:
            self.write(self.figures)
        self.show(self.figures)

    def speed(self) -> float | None:
        """Tokens a second through a block, measuring or passing on."""
        return round(self.tokens / self.measuring, 1) if self.measuring > 0 else None

    def left(self, now: float, stage: str, block: int, blocks: int) -> float | None:
        """Seconds to go, from the blocks done since this process began."""
        if self._first is None:
            return None
        done = block + (stage == "done") - self._first[1]
        if done <= 0:
            return None
        return round((now - self._first[0]) / done * (blocks - self._first[1] - done), 1)

    def write(self, line: dict[str, Any]) -> None:
        if self._log is None:
            return
        try:
            self._log.write(json.dumps(line) + "\n")
            self._log.flush()
        except OSError as error:
            name, self._log = self._log.name, None
            raise SympruneError(f"Cannot write the log {name}: {error.strerror}.") from error

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def _open(path: Path) -> TextIO:
    """Append: a run that goes on goes on in its log."""
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise SympruneError(f"Cannot write the log {path}: {error.strerror}.") from error
