"""What a GGUF file says about itself (`general.name`, `general.license`, ...), read from its first
bytes alone: a list of the tokens of a vocabulary is stepped over, weights are never reached."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
PREFIX = "general."
TEXT, LIST = 8, 9
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
LONGEST = 4096
MOST_KEYS = 10_000
MOST_ENTRIES = 10_000_000


def read_gguf_facts(path: Path) -> dict[str, Any]:
    """Its `general.` entries without that prefix: texts, numbers and lists of texts. Nothing where
    the file is no GGUF file or ends early: a card can do without."""
    found: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            magic, version, _, count = struct.unpack("<4sIQQ", _take(file, 24))
            if magic != MAGIC or version not in VERSIONS:
                return found
            for _ in range(min(count, MOST_KEYS)):
                key = _read_text(file)
                (kind,) = struct.unpack("<I", _take(file, 4))
                value = _read_value(file, kind, key)
                if key.startswith(PREFIX) and value is not None:
                    found[key.removeprefix(PREFIX)] = value
    except (OSError, ValueError, struct.error):
        pass  # what was read until then is true
    return found


def _read_value(file: BinaryIO, kind: int, key: str) -> Any:
    """The value, or None for a list that is stepped over."""
    if kind == TEXT:
        return _read_text(file)
    if kind != LIST:
        return struct.unpack(f"<{_sign(kind)}", _take(file, _size(kind)))[0]
    inner, count = struct.unpack("<IQ", _take(file, 12))
    if count > MOST_ENTRIES:
        raise ValueError(f"a list of {count} entries")
    if inner != TEXT:
        file.seek(_size(inner) * count, 1)
        return None
    if key.startswith(PREFIX):
        return [_read_text(file) for _ in range(count)]
    for _ in range(count):
        file.seek(_length(file), 1)
    return None


def _read_text(file: BinaryIO) -> str:
    """A text; one that is too long for a card is stepped over and empty."""
    length = _length(file)
    if length > LONGEST:
        file.seek(length, 1)
        return ""
    return _take(file, length).decode("utf-8", errors="replace")


def _length(file: BinaryIO) -> int:
    (length,) = struct.unpack("<Q", _take(file, 8))
    if length >= 2**62:
        raise ValueError(f"a text of {length} bytes")
    return int(length)


def _take(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError("the file ends here")
    return data


def _sign(kind: int) -> str:
    if kind not in NUMBERS:
        raise ValueError(f"an unknown kind of value, {kind}")
    return NUMBERS[kind]


def _size(kind: int) -> int:
    return struct.calcsize(f"<{_sign(kind)}")
