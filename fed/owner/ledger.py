"""The privacy ledger: every private release of an owner's data, on the owner's disk, for ever.

One line of JSON per release, each with the hash of the line before it; a file beside it remembers
the last hash, so that lines that were cut off are missed, too. Who writes holds a lock. A release
is written down before it is made; a ledger that is damaged allows nothing and is never begun anew.
It is of all data together: what counts for some of them are the releases of the same files.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symprune.errors import OwnersAffair, Refusal
from symprune.fed.owner.places import overlap
from symprune.fed.privacy import Release, compose, in_one_unit, renyi_bound
from symprune.machine import durable
from symprune.validation import has_kinds, parse_json

FIRST = "0" * 64
LINE = {"entry": int, "time": str, "what": str, "run": str, "rate": float, "multiplier": float}
LINE |= {"steps": int, "unit": str, "data": list, "before": str, "hash": str}


@dataclass(frozen=True)
class Ledger:
    """The ledger in a file, and the budget that all releases of some data share, `places_of` which
    are given; without these, all of its releases."""

    file: Path
    epsilon: float
    delta: float
    data: tuple[str, ...] = ()

    def spend(self, release: Release, what: str, run: str) -> None:
        """Write a release down that is about to be made, or refuse it."""
        with self._locked():
            entries = self._read()
            made = in_one_unit([*self._counting(entries), release])
            if renyi_bound(made, self.delta) > self.epsilon:  # quick, and enough as a rule
                after = compose(made, self.delta)
                if after > self.epsilon:
                    raise Refusal(
                        f"The owner's privacy budget is spent: {what} would bring epsilon to "
                        f"{after:.3g}, of {self.epsilon:g} at delta = {self.delta:g}."
                    )
            self._append(entries, release, what, run)

    def spent(self) -> float:
        """The epsilon of all releases so far."""
        if not self.file.exists() and not self._head.exists():
            return 0.0
        with self._locked():
            return compose(in_one_unit(self._counting(self._read())), self.delta)

    def _counting(self, entries: list[dict[str, Any]]) -> list[Release]:
        """The releases of these data."""
        return [_release(entry) for entry in entries if overlap(self.data, entry["data"])]

    @property
    def _head(self) -> Path:
        return self.file.with_name(f"{self.file.name}.head")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            import fcntl
        except ImportError:
            raise OwnersAffair("A privacy ledger needs file locks, which are missing.") from None
        self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = self.file.with_name(f"{self.file.name}.lock")
        with os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600), "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield

    def _read(self) -> list[dict[str, Any]]:
        """All entries, if every one of them is there and as it was written."""
        head = self._head.read_text().strip() if self._head.exists() else FIRST
        if not self.file.exists():
            self._check(head == FIRST, "it is gone")
            return []
        entries, before, remembered = [], FIRST, head == FIRST
        for number, line in enumerate(self.file.read_bytes().split(b"\n")[:-1]):
            entry = self._entry(line, number, before)
            before = entry["hash"]
            remembered = remembered or before == head
            entries.append(entry)
        self._check(self.file.read_bytes().endswith(b"\n") or not entries, "its last line is torn")
        self._check(bool(entries), "it is empty")
        self._check(remembered, "lines were cut off")
        return entries

    def _entry(self, line: bytes, number: int, before: str) -> dict[str, Any]:
        try:
            entry = parse_json(line)
        except (ValueError, RecursionError):
            entry = None
        self._check(has_kinds(entry, LINE), f"line {number + 1} is no entry")
        assert isinstance(entry, dict)
        whole = entry["hash"] == _hash(entry) and entry["before"] == before
        self._check(whole and entry["entry"] == number, f"line {number + 1} was changed")
        return entry

    def _append(self, entries: list[dict[str, Any]], release: Release, what: str, run: str) -> None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        entry: dict[str, Any] = {"entry": len(entries), "time": now, "what": what, "run": run}
        entry |= {"rate": release.rate, "multiplier": release.multiplier, "steps": release.steps}
        entry |= {"unit": release.unit, "data": list(self.data)}
        entry["before"] = entries[-1]["hash"] if entries else FIRST
        entry["hash"] = _hash(entry)
        line = (json.dumps(entry) + "\n").encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        try:
            with os.fdopen(os.open(self.file, flags, 0o600), "wb", buffering=0) as out:
                out.write(line)
                os.fsync(out.fileno())
            with durable.replace_file(self._head, 0o600) as new:
                new.write_text(entry["hash"])
        except OSError as error:
            raise OwnersAffair(
                f"The privacy ledger {self.file} cannot be written: {error.strerror}."
            ) from None

    def _check(self, whole: bool, sentence: str) -> None:
        if not whole:
            raise OwnersAffair(
                f"The privacy ledger {self.file} is damaged ({sentence}), so nothing is released."
            )


def _hash(entry: dict[str, Any]) -> str:
    content = {name: value for name, value in entry.items() if name != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _release(entry: dict[str, Any]) -> Release:
    rate, multiplier = float(entry["rate"]), float(entry["multiplier"])
    return Release(rate, multiplier, entry["steps"], entry["unit"])
