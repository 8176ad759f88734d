"""The forecast of lm-eval's tasks: their requests, counted, and some of them timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from symprune.jobs.estimate.forecast import Forecast
from symprune.jobs.estimate.timed import why
from symprune.machine import memory
from symprune.machine.capacity import Capacity
from symprune.models.layout import device_of
from symprune.wording import counted


class Ahead(Protocol):
    """Requests of a kind, as the harness has them."""

    @property
    def kind(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class TasksAhead:
    """What is known of the requests so far: they come kind by kind, each before its first is made.
    go_on is told each time; begun: when the command did."""

    def __init__(
        self,
        tasks: Sequence[str],
        model: Any,
        stored: torch.dtype,
        device: str,
        begun: float,
        go_on: Callable[[Forecast], bool],
    ) -> None:
        self._parts, self._go_on, self._begun = [counted(len(tasks), "task")], go_on, begun
        at = device_of(model)
        self._where = why(at, device, model.dtype, stored)
        self._capacity, self._held = Capacity.of(Path(), at), memory.now()
        self._seconds: dict[str, float] = {}

    def foresee(self, ahead: Ahead) -> bool:
        """Whether they are made."""
        self._parts.append(f"{ahead.count:,} {ahead.kind}")
        self._seconds[ahead.kind] = ahead.seconds
        spent = time.perf_counter() - self._begun
        found = Forecast(
            ", ".join(self._parts), self._where, self._capacity, dict(self._seconds), spent,
            memory.peak(), self._held, remedy="choose a smaller --batch-size",
        )  # fmt: skip
        return self._go_on(found)
