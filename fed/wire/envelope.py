"""A letter: what two machines say to each other, as one string of bytes.

A short JSON header says what it is about, the parts behind it are encoded messages. Nothing in it
can run: no pickle, no class names. Whoever opens a letter bounds its size first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from symprune.errors import SympruneError
from symprune.validation import parse_json

Header = dict[str, Any]
MAX_HEADER = 1 << 20


@dataclass(frozen=True)
class Letter:
    header: Header
    parts: tuple[bytes, ...] = ()

    def pack(self) -> bytes:
        """Four bytes with the header's length, the header, the parts."""
        sizes = [len(part) for part in self.parts]
        header = json.dumps({**self.header, "sizes": sizes}, separators=(",", ":")).encode()
        return b"".join((len(header).to_bytes(4, "little"), header, *self.parts))


def unpack(data: bytes, most: int | None = None) -> Letter:
    """The letter in these bytes, if it is one and has no more than `most` of them."""
    if most is not None and len(data) > most:
        raise SympruneError(f"A letter has {len(data)} bytes; at most {most} are expected.")
    length = int.from_bytes(data[:4], "little")
    if len(data) < 4 or not 2 <= length <= min(MAX_HEADER, len(data) - 4):
        raise SympruneError("A letter has no header.")
    try:
        header = parse_json(data[4 : 4 + length])
        sizes = header.pop("sizes")
        whole = all(type(size) is int and size >= 0 for size in sizes)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise SympruneError("A letter's header cannot be read.") from None
    if not whole or 4 + length + sum(sizes) != len(data):
        raise SympruneError("A letter's parts do not add up to its length.")
    parts, at = [], 4 + length
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    return Letter(header, tuple(parts))
