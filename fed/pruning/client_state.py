"""A client's memory in a folder: its state after the last message, and the masks block by block.

Everything is safetensors with numbers and text; files are replaced whole and readable by their
owner only, for they hold the client's hidden states and its secrets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.pruning.messages import Settings
from symprune.fed.pruning.packed_stats import Packed
from symprune.machine import durable
from symprune.maskset import MaskSet
from symprune.stats import Needs
from symprune.validation import has_kinds, parse_json

FILE = "state.safetensors"
VERSION = "3"
SETTINGS = {"number": int, "clients": int, "secure": bool, "noise": float, "clip": float}
SETTINGS |= {"needs": list}


@dataclass
class State:
    """What a client remembers: the block it measured last, what it sent, and what comes next."""

    settings: Settings | None = None
    block: int = -1
    hidden: Tensor | None = None
    secret: int = 0
    seeds: dict[int, bytes] = field(default_factory=dict)
    measured: Packed | None = None


def save(folder: Path, state: State) -> None:
    tensors: dict[str, Tensor] = {} if state.measured is None else dict(vars(state.measured))
    if state.hidden is not None:
        tensors["hidden"] = state.hidden
    plain: dict[str, Any] = {"block": state.block, "secret": hex(state.secret)}
    plain["seeds"] = {str(number): seed.hex() for number, seed in state.seeds.items()}
    if state.settings is not None:
        needs = state.settings.needs
        sides = [sorted(needs.inputs), sorted(needs.outputs)]
        plain["settings"] = {**vars(state.settings), "needs": [*sides, needs.token_limit]}
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    about = {"version": VERSION, "state": json.dumps(plain)}
    durable.write_tensors(folder / FILE, tensors, about, mode=0o600)


def load(folder: Path) -> State:
    """The state that was saved last; a new one where there is none."""
    file = folder / FILE
    if not file.exists():
        return State()
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            if metadata.get("version") != VERSION:
                raise SympruneError(f"{file} is of another version.")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return _state(parse_json(metadata["state"]), tensors)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise SympruneError(f"The client's state {file} is corrupt: {error}.") from error


def _state(plain: Any, tensors: dict[str, Tensor]) -> State:
    if not has_kinds(plain, {"block": int, "secret": str, "seeds": dict}):
        raise ValueError("it is not the state of a client")
    if "settings" in plain and not has_kinds(plain["settings"], SETTINGS):
        raise ValueError("what it was told is not complete")
    state = State(block=plain["block"], secret=int(plain["secret"], 16))
    state.seeds = {int(number): bytes.fromhex(seed) for number, seed in plain["seeds"].items()}
    state.hidden = tensors.pop("hidden", None)
    state.measured = Packed(**tensors) if tensors else None
    if "settings" in plain:
        inputs, outputs, limit = plain["settings"].pop("needs")
        needs = Needs(frozenset(inputs), frozenset(outputs), limit)
        state.settings = Settings(needs=needs, **plain["settings"])
    return state


def save_masks(folder: Path, block: int, masks: MaskSet) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    masks.save(folder / f"masks-{block:04d}.safetensors")


def load_masks(folder: Path) -> MaskSet:
    """The masks of all blocks so far."""
    masks = MaskSet()
    for file in sorted(folder.glob("masks-*.safetensors")):
        for name, keep in MaskSet.load(file).items():
            masks[name] = keep
    return masks
