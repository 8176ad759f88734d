"""The forecast of a run: its time, memory and disk beside what the machine has, in a sentence, in a
table and for programs; an error where it obviously does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from symprune.errors import SympruneError
from symprune.eval.tables import duration, size
from symprune.machine.capacity import Capacity

OFFLOAD = "lower --nsamples or --seqlen, or pass --offload-activations"
SLACK = 1.2  # how far the memory of a run may be from what is said of it


@dataclass(frozen=True)
class Forecast:
    """What is done, and where and why there; seconds of each step and those that have passed; bytes
    of memory at most, of them held already, and of disk; and what there is."""

    what: str
    where: str
    capacity: Capacity
    seconds: Mapping[str, float] = field(default_factory=dict)
    spent: float = 0.0
    memory: int = 0
    held: int = 0
    disk: int = 0
    remedy: str = "use shorter windows"  # where memory is short

    @property
    def total(self) -> float:
        return self.spent + sum(self.seconds.values())

    @property
    def room(self) -> int:
        """Memory the run may come to hold."""
        free = self.capacity.memory
        if self.capacity.accelerator is not None:
            free = self.capacity.accelerator
        return self.held + free

    def sentences(self) -> list[str]:
        """What will be done, and what it takes."""
        parts = [f"about {duration(self.total)}"] if self.seconds else []
        parts += [f"{size(self.memory)} of memory (of {size(self.room)})"]
        if self.disk:
            free = size(self.capacity.disk)
            parts.append(f"{size(self.disk)} of disk (of {free})")
        return [f"{self.what}, {self.where}", f"Takes {', '.join(parts)}"]

    def check(self) -> None:
        """Fail where the machine obviously has not what the run takes."""
        if self.memory > SLACK * self.room:
            kind = "memory" if self.capacity.accelerator is None else "the accelerator's memory"
            raise SympruneError(
                f"The run needs about {size(self.memory)} of {kind}, "
                f"{size(self.room)} can be had: {self.remedy}."
            )
        if self.disk > self.capacity.disk:
            raise SympruneError(
                f"The disk is full: the run writes {size(self.disk)}, "
                f"{size(self.capacity.disk)} are free."
            )

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "where": self.where,
            "seconds": self.total,
            "seconds_of": dict(self.seconds),
            "memory_bytes": self.memory,
            "memory_there": self.room,
            "disk_bytes": self.disk,
            "disk_there": self.capacity.disk,
        }


def where_and_why(device: torch.device, asked: str) -> str:
    """Which device is used, and why that one."""
    reason = "as asked for" if asked != "auto" else "no accelerator was found"
    if device.type != "cpu" and asked == "auto":
        reason = "the accelerator that was found"
    return f"on {device} ({reason})"


def attempt(make: Callable[[], Forecast]) -> Forecast | None:
    """A forecast; None where the model cannot be timed: an estimate never ends a run, and what is
    wrong is said where the run meets it."""
    try:
        return make()
    except Exception:
        return None


def needed(found: Forecast | None) -> Forecast:
    """A forecast that was asked for."""
    if found is None:
        raise SympruneError("It cannot be told what it takes; without --dry-run the run says why.")
    return found
