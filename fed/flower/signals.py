"""Signals while processes are started and ended: none of them leaves a process behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], object]


@contextmanager
def ending_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that what it started is ended, too. It is
    the first signal that ends it: those behind it, however close, would end what tidies up."""

    def leave(number: int, frame: FrameType | None) -> None:
        _set(dict.fromkeys(ENDING, _ignore))
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with _handling(leave):
        yield


@contextmanager
def undisturbed() -> Iterator[None]:
    """The block runs to its end however often it is asked to stop: it is what stops things."""
    with _handling(_ignore):
        yield


@contextmanager
def postponed() -> Iterator[None]:
    """Signals that come meanwhile come when the block is over: a process that was just started is
    known by then."""
    came: list[int] = []
    with _handling(lambda number, _: came.append(number)):
        yield
    for number in came[:1]:
        signal.raise_signal(number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A function, not SIG_IGN, which a signal that is already on its way would report as lost, and
    which processes that are started meanwhile would inherit."""


@contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals, and only it may say what they do
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        _set(dict.fromkeys(ENDING, handler))
        yield
    finally:
        _set(before)


def _set(handlers: dict[signal.Signals, Handler | int | None]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # one that Python did not set cannot be set again
            signal.signal(number, handler)
