"""What a client keeps on its disk between two letters: two states, and its last reply."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.devices import MAIN_MEMORY, working_on
from symprune.fed.protocol import State, check
from symprune.machine import durable

VERSION = "1"


@dataclass
class Record:
    """What a client keeps between two letters."""

    counted: int  # the last turn whose work is part of `heard`; -1: none
    turn: int  # the last turn it heard
    heard: State  # after listening to that turn
    worked: State | None = None  # after working in that turn
    reply: bytes = b""

    def state(self, counted: int) -> State | None:
        """The state that fits the server's count, if this is one of the two."""
        if self.worked is not None and counted == self.turn:
            return self.worked
        return self.heard if counted == self.counted else None


def record_file(folder: Path, run: str) -> Path:
    """Where a client keeps its state in a run."""
    check(re.fullmatch(r"[0-9a-z-]{1,64}", run) is not None, f"{run!r} is no name for a run.")
    return folder / f"{run}.safetensors"


def client_state(folder: Path, run: str, counted: int) -> State:
    """A client's state as the server counts it, one row."""
    record = load_record(record_file(folder, run))
    state = None if record is None else record.state(counted)
    if state is None:
        raise SympruneError(f"{folder} has no state of run {run} after turn {counted}.")
    return state


def save_record(file: Path, record: Record) -> None:
    """Readable by its owner only: it is personal."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    tensors = {f"heard/{k}": v.cpu().contiguous().clone() for k, v in record.heard.items()}
    if record.worked is not None:
        worked = record.worked.items()
        tensors |= {f"worked/{k}": v.cpu().contiguous().clone() for k, v in worked}
    reply = np.frombuffer(record.reply, np.uint8).copy()
    tensors["reply"] = torch.from_numpy(reply)
    numbers = {"counted": record.counted, "turn": record.turn, "worked": bool(record.reply)}
    metadata = {"version": VERSION, **{k: str(int(v)) for k, v in numbers.items()}}
    durable.write_tensors(file, tensors, metadata, mode=0o600)


def load_record(file: Path, device: torch.device = MAIN_MEMORY) -> Record | None:
    """The record with its states on this device, or None if there is none or it is damaged: then
    the server helps."""
    if not file.exists():
        return None
    try:
        with working_on(MAIN_MEMORY), safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        reply = tensors.pop("reply")
        tensors = {"reply": reply, **{k: v.to(device) for k, v in tensors.items()}}
        return _record(metadata, tensors) if metadata.get("version") == VERSION else None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError):
        return None


def _record(metadata: dict[str, str], tensors: dict[str, Tensor]) -> Record:
    reply = tensors.pop("reply").numpy().tobytes()
    states: dict[str, State] = {"heard": {}, "worked": {}}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        states[part][name] = tensor
    worked = states["worked"] if metadata["worked"] == "1" else None
    return Record(int(metadata["counted"]), int(metadata["turn"]), states["heard"], worked, reply)
