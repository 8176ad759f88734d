"""What a message between server and client is, in words, for the owner's audit log.

Knows no torch, which the process that writes the log does not import.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from symprune.errors import SympruneError
from symprune.fed.wire.bits import bytes_for, index_bits, read_varint, take, unpack_integers
from symprune.fed.wire.envelope import Header, unpack

LONGEST = 60  # characters of a name that somebody else chose
PRUNING = {
    0: "an introduction to federated pruning",
    1: "the statistics of block {0}",
    2: "the Gram matrices of block {0}",
    3: "the last masks of federated pruning",
    4: "shares for the first secure sum",
    5: "shares to unmask secure sum {0}",
}
HEAD, INTEGER = 8, 8  # numbers of a head, and the code of their type


def sentence(data: bytes) -> str:
    """A letter of training or a message of pruning in words; anything else is bytes."""
    try:
        return _of_letter(unpack(data).header)
    except (SympruneError, TypeError):
        pass
    try:
        numbers = _head(data)
        return PRUNING[numbers[1]].format(*numbers[2:])
    except (SympruneError, KeyError, ValueError, IndexError):
        return "bytes that are no message"


def _of_letter(header: Header) -> str:
    if "status" in header:
        return f"{_shown(header['status'])}{_number(header, 'turn', ' in round')}"
    job = _shown(header.get("algorithm"))
    what = {
        "describe": f"what {job} needs to know of its data",
        "turn": f"{'work' if header.get('work') else 'to listen'}{_round(header)} of {job}",
        "enter": f"keys for secure sums of {job}",
        "share": f"shares for secure sums of {job}",
        "sum": f"its part of the secure sum{_round(header)} of {job}",
        "unmask": f"shares to unmask{_round(header)} of {job}",
    }
    return what.get(_shown(header.get("kind")), "a letter of no kind there is")


def _round(header: Header) -> str:
    return _number(header, "turn", " in round")


def _number(header: Header, name: str, before: str) -> str:
    value = header.get(name)
    return f"{before} {value}" if type(value) is int and abs(value) < 1 << 63 else ""


def _shown(value: Any) -> str:
    """A word that somebody else chose, as far as it is one."""
    return re.sub(r"[^\w.-]", "?", str(value))[:LONGEST]


def _head(data: bytes) -> list[int]:
    """The whole numbers a message of pruning begins with, whichever way they are written."""
    length, at = read_varint(data, read_varint(data, 0)[1])
    if take(data, at, length) != b"head":
        raise SympruneError("A message has no head.")
    kind, at = take(data, at + length, 1)[0], at + length + 1
    dimensions, at = read_varint(data, at)
    size, at = read_varint(data, at)
    form = kind >> 4
    if kind & 15 != INTEGER or form > 2 or (dimensions, size) != (1, HEAD):
        raise SympruneError("A head is of whole numbers.")
    places = np.arange(HEAD)
    if form == 1:
        count, at = read_varint(data, at)
        bits = index_bits(HEAD)
        where = take(data, at, bytes_for(min(count, HEAD) * bits))
        places, at = unpack_integers(where, bits, min(count, HEAD)), at + len(where)
    elif form == 2:
        places, at = np.flatnonzero(unpack_integers(take(data, at, 1), 1, HEAD)), at + 1
    values = np.frombuffer(take(data, at, 8 * len(places)), "<i8")
    found = np.zeros(HEAD, np.int64)
    found[places] = values
    return [int(value) for value in found]
