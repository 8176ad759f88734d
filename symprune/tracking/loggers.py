"""Where figures of a run go: TensorBoard, Weights & Biases. Each is imported when it is used."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Logger(Protocol):
    """Where figures go. title: what it is called. where: what to look at."""

    title: str
    where: str

    def add(self, axis: str, step: int, numbers: Mapping[str, float], label: str) -> None: ...
    def note(self, name: str, text: str) -> None: ...
    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """An event file in a folder of the run's own.

    It is written here and now: TensorBoard's own writer has a thread for it, and waits forever for
    that thread once a disk is full.
    """

    title = "TensorBoard"

    def __init__(self, run: str, settings: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        above = Path(os.environ.get("TENSORBOARD_LOGGING_DIR", "runs"))
        folder = above / f"{run}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self.where = str(folder)
        self._event, self._file = Event, (folder / name).open("ab")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        self.note("settings", f"```\n{json.dumps(settings, indent=2, default=str)}\n```")

    def add(self, axis: str, step: int, numbers: Mapping[str, float], label: str) -> None:
        from torch.utils.tensorboard import summary

        for name, number in numbers.items():
            self._write(step=step, summary=summary.scalar(name, number))
        if label:
            self._write(step=step, summary=summary.text(axis, label))

    def note(self, name: str, text: str) -> None:
        from torch.utils.tensorboard import summary

        self._write(summary=summary.text(name, text))

    def _write(self, **values: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **values).SerializeToString())
        self._records.flush()

    def close(self, failed: bool) -> None:
        self._records.close()


class WeightsAndBiases:
    """A run of a project, each kind of figure with an axis of its own."""

    title = "Weights & Biases"

    def __init__(self, run: str, settings: Mapping[str, Any]) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "symprune")
        self._run = wandb.init(project=project, name=run, config=dict(settings))
        self.where = str(getattr(self._run, "url", None) or f"project {project}")
        self._known: set[str] = set()

    def add(self, axis: str, step: int, numbers: Mapping[str, float], label: str) -> None:
        for name in numbers.keys() - self._known:
            self._run.define_metric(name, step_metric=axis)
        self._known |= numbers.keys()
        self._run.log({axis: step, **numbers, **({f"{axis} is": label} if label else {})})

    def note(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


MAKERS: dict[str, type[TensorBoard] | type[WeightsAndBiases]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
"""By the names of their packages, which are what transformers calls them."""
