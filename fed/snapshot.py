"""A run on disk: one safetensors file with both states, the ledger and the history."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from symprune.errors import SympruneError
from symprune.fed.protocol import State
from symprune.machine import durable
from symprune.validation import parse_json

VERSION = 1


@dataclass
class Snapshot:
    """Everything a run needs to go on: the next turn, the states, the ledger, the history, and how
    far apart replies usually are."""

    run: str  # which algorithm, problem and seed; must match on resume
    turn: int
    server: State
    client: State
    ledger: State
    history: list[dict[str, Any]]
    usual: dict[str, float] = field(default_factory=dict)


def save(path: Path, snapshot: Snapshot) -> None:
    """A killed run leaves the old file or the new one."""
    tensors = {
        f"{part}/{name}": tensor.cpu().contiguous().clone()
        for part in ("server", "client", "ledger")
        for name, tensor in getattr(snapshot, part).items()
    }
    metadata = {
        "version": str(VERSION),
        "run": snapshot.run,
        "turn": str(snapshot.turn),
        "history": json.dumps(snapshot.history),
        "usual": json.dumps(snapshot.usual),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write_tensors(path, tensors, metadata)
    except (OSError, SafetensorError) as error:
        raise SympruneError(f"Checkpoint {path} cannot be written: {error}.") from None


def load(path: Path, device: str | torch.device = "cpu") -> Snapshot:
    """The run as it was saved, its states on this device."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise SympruneError(f"Checkpoint {path} cannot be read: {error}.") from None
    if metadata.get("version") != str(VERSION):
        raise SympruneError(f"Checkpoint {path} is not one of a federated run.")
    parts: dict[str, State] = {"server": {}, "client": {}, "ledger": {}}
    try:
        for key, tensor in tensors.items():
            part, _, name = key.partition("/")
            parts[part][name] = tensor.to("cpu" if part == "ledger" else device)
        run, turn, history = metadata["run"], int(metadata["turn"]), parse_json(metadata["history"])
        usual = {k: float(v) for k, v in parse_json(metadata.get("usual", "{}")).items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise SympruneError(f"Checkpoint {path} is corrupt: {error}.") from None
    told = isinstance(history, list) and all(isinstance(record, dict) for record in history)
    if turn < 0 or not told:
        raise SympruneError(f"Checkpoint {path} is corrupt: its history is not one.")
    return Snapshot(run, turn, history=history, usual=usual, **parts)
