"""The audit log: who asked a client what, and what was answered, as hashes on the owner's disk.

Each line has the hash of the line before it, and who writes holds a lock.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from symprune.errors import SympruneError
from symprune.fed.owner.policy import policy_of
from symprune.machine.lock import alone
from symprune.validation import parse_json

FILE = "audit.jsonl"
LONGEST = 4096  # characters of a sentence
TAIL = 1 << 17  # bytes from the end, in which the last line is whole


def audited(
    answer: Callable[[], bytes],
    asked: bytes,
    folder: Path,
    config: Mapping[str, Any],
    who: Mapping[str, Any],
    sentence: Callable[[bytes], str] = lambda _: "bytes",
    refusal_in: Callable[[bytes], str | None] = lambda _: None,
) -> bytes:
    """What `answer` says to these bytes, once it is written down that it was said, and to whom. An
    answer that cannot be written down is not given. sentence: what bytes are, in words. refusal_in:
    the sentence of an answer that says why there is none."""
    who = {**who, "what": sentence(asked)}
    file = _file(folder, config)
    try:
        said = answer()
    except Exception as error:
        _write(file, {**who, **_content("asked", asked), "refused": str(error)})
        raise
    why = refusal_in(said)
    end = {"with": sentence(said)} if why is None else {"refused": why}
    _write(file, {**who, **_content("asked", asked), **_content("answered", said), **end})
    return said


def note(folder: Path, config: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
    """Write down what the server is not told, for the owner. Where that cannot be done, nothing is
    lost but the note: the answer itself has a line of its own."""
    file = folder / FILE
    with suppress(SympruneError):  # of a policy that cannot be read, too
        file = _file(folder, config)
    with suppress(SympruneError):
        _write(file, entry)


def _file(folder: Path, config: Mapping[str, Any]) -> Path:
    place = policy_of(config).audit
    return folder / FILE if place is None else Path(place).expanduser()


def check_log(file: Path) -> int:
    """How many lines a log has, each of them behind the one it was written behind; the first that
    is not is named. That lines are missing at its end is not seen."""
    before = b""
    lines = file.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = parse_json(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict) or entry.get("before") != _hash(before):
            raise SympruneError(f"{file}: line {number} of the audit log is not as it was written.")
        before = line
    return len(lines)


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _content(what: str, data: bytes) -> dict[str, Any]:
    return {what: hashlib.sha256(data).hexdigest(), f"{what}_bytes": len(data)}


def _write(file: Path, entry: Mapping[str, Any]) -> None:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    short = {name: v[:LONGEST] if isinstance(v, str) else v for name, v in entry.items()}
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    try:
        with (
            alone(file.with_name(f"{file.name}.lock")),
            os.fdopen(os.open(file, flags, 0o600), "r+b", buffering=0) as out,
        ):
            size = out.seek(0, os.SEEK_END)
            out.seek(max(0, size - TAIL))
            end = out.read(TAIL)
            torn = b"" if end.endswith(b"\n") or not end else b"\n"
            last = end.removesuffix(b"\n").rpartition(b"\n")[2]
            line = json.dumps({"time": now, **short, "before": _hash(last)}).encode()
            out.write(torn + line + b"\n")
    except OSError as error:
        raise SympruneError(f"The audit log {file} cannot be written: {error.strerror}.") from None
