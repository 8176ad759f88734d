"""Signals while processes are started and ended: none of them leaves a process behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ending_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that what it started is ended, too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handling(dict.fromkeys(ENDING, leave)):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """The block runs to its end however often it is asked to stop: it is what stops things."""
    with _handling(dict.fromkeys((signal.SIGINT, *ENDING), signal.SIG_IGN)):
        yield


@contextmanager
def _handling(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals, and only it may say what they do
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
