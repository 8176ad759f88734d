"""The audit log: who asked a client what, and what was answered, as hashes on the owner's disk."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from symprune.errors import SympruneError
from symprune.fed.owner.policy import policy_of

FILE = "audit.jsonl"


def audited(
    answer: Callable[[], bytes],
    asked: bytes,
    folder: Path,
    config: Mapping[str, Any],
    who: Mapping[str, Any],
    refusal_in: Callable[[bytes], str | None] = lambda _: None,
) -> bytes:
    """What `answer` says to these bytes, once it is written down that it was said, and to whom. An
    answer that cannot be written down is not given. refusal_in: the sentence of an answer that says
    why there is none."""
    place = policy_of(config).audit
    file = folder / FILE if place is None else Path(place).expanduser()
    try:
        said = answer()
    except Exception as error:
        _write(file, {**who, **_content("asked", asked), "refused": str(error)})
        raise
    why = refusal_in(said)
    refused = {} if why is None else {"refused": why}
    _write(file, {**who, **_content("asked", asked), **_content("answered", said), **refused})
    return said


def _content(what: str, data: bytes) -> dict[str, Any]:
    return {what: hashlib.sha256(data).hexdigest(), f"{what}_bytes": len(data)}


def _write(file: Path, entry: Mapping[str, Any]) -> None:
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    line = (json.dumps({"time": now, **entry}) + "\n").encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(file, flags, 0o600), "wb", buffering=0) as out:
            out.write(line)
    except OSError as error:
        raise SympruneError(f"The audit log {file} cannot be written: {error.strerror}.") from None
