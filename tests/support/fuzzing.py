"""Bytes and values that are nearly right, for whatever reads what strangers wrote.

A reader may give a result or refuse in one sentence. Any other exception, more memory than ROOM for
inputs of some kilobytes, or work without an end fails the test. Every run tries the same examples.
"""

from __future__ import annotations

import copy
import json
import math
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from symprune.errors import SympruneError

ROOM = 2**29  # bytes of address space, of which every thread that starts reserves some, too
LONGEST = 20.0  # seconds of the processor's time, not of a clock, for one input
FEW, MANY = 200, 20_000
EXAMPLES = pytest.mark.parametrize(
    "examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"]
)
ODD_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 7, 1.5, -0.0, 2**31, 2**40, 2**63, 10**30, math.inf, math.nan,
    "", "x", "..", "../x", "0", "\0", "\ud800", [], [[]], [0], [-1, 2**40], ["x"], {}, {"x": 1},
]  # fmt: skip
ODD_BYTES = [
    b"", b"\0", b"\xff", b"\x80", b"-1", b"1e999", b"99999999999999999999", b"null", b"{}", b"[]",
    b"[" * 4000, b'"', b"}", b",", b"\n", b"*a", b"&a ", b"!!python/object:os.system ", b"\xc3(",
    b"\xff" * 8, b"\0" * 8, b"\x01" + b"\0" * 7,
]  # fmt: skip


def fuzz(read: Callable[[Any], object], inputs: st.SearchStrategy[Any], examples: int) -> None:
    """Have `read` try this many inputs."""

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def try_one(value: Any) -> None:
        read_or_refuse(read, value)

    try_one()


def read_or_refuse(read: Callable[[Any], object], value: Any) -> None:
    """Anything but a result or one sentence is an error."""
    with little_room(), an_end():
        try:
            read(value)
        except SympruneError as refused:
            said = str(refused)
            assert said.strip() and "\n" not in said.strip(), f"not one sentence: {said!r}"


@contextmanager
def little_room() -> Iterator[None]:
    """What allocates by what a file claims, and not by its size, is out of memory here."""
    status = Path("/proc/self/statm")
    if not status.exists():  # where the system keeps no such account
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(status.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def an_end() -> Iterator[None]:
    """A failure where reading takes more of the processor than any good input could."""

    def stop(*_: object) -> None:
        raise AssertionError("it goes on and on")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def damaged(good: bytes, beginning: int = 600) -> st.SearchStrategy[bytes]:
    """Any bytes at all, or good ones that were cut off, or changed in a few places, most of them
    near the beginning, where formats say what follows."""
    place = st.integers(0, min(len(good), beginning)) | st.integers(0, len(good))
    inserted = st.binary(max_size=8) | st.sampled_from(ODD_BYTES)
    edit = st.tuples(place, st.integers(0, 12), inserted)
    edited = st.lists(edit, min_size=1, max_size=4).map(lambda edits: _edit(good, edits))
    cut = place.map(lambda end: good[:end])
    return edited | cut | st.binary(max_size=200)


def _edit(good: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    changed = bytearray(good)
    for place, removed, inserted in edits:
        changed[place : place + removed] = inserted
    return bytes(changed)


def changed(good: Any) -> st.SearchStrategy[Any]:
    """Plain values, as JSON has them, in which some are replaced, left out or added."""
    change = st.tuples(
        st.sampled_from(list(_places(good))),
        st.sampled_from(["replace", "leave out", "add"]),
        st.sampled_from(ODD_VALUES) | st.integers() | st.floats() | st.text(max_size=5),
    )
    return st.lists(change, min_size=1, max_size=3).map(lambda changes: _change(good, changes))


def _places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values inside a value, itself included."""
    yield way
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for key, entry in entries:
        yield from _places(entry, (*way, key))


def _change(good: Any, changes: list[tuple[tuple[Any, ...], str, Any]]) -> Any:
    whole = {"value": copy.deepcopy(good)}
    for way, how, value in changes:
        holder: Any = whole
        try:
            *above, last = ("value", *way)
            for key in above:
                holder = holder[key]
            if how == "leave out" and way:
                del holder[last]
            elif how == "add" and isinstance(holder[last], dict):
                holder[last][str(value)] = copy.deepcopy(value)
            elif how == "add" and isinstance(holder[last], list):
                holder[last].append(copy.deepcopy(value))
            else:
                holder[last] = copy.deepcopy(value)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took away what this one is about
    return whole["value"]


def changed_json(good: Any) -> st.SearchStrategy[bytes]:
    """The same as the bytes of a file, which may be damaged as well."""
    texts = changed(good).map(lambda value: json.dumps(value).encode())
    return texts | damaged(json.dumps(good).encode())
