"""A client's memory in a folder: its state after the last message, and the masks block by block.

Everything is safetensors with numbers and text; files are replaced whole and readable by their
owner only, for they hold the client's hidden states and its secrets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.fed.pruning.aggregate.ballots import Ballot
from symprune.fed.pruning.aggregate.grams import Half
from symprune.fed.pruning.aggregate.packed_stats import Packed
from symprune.fed.pruning.messages import Settings, read_recipe
from symprune.fed.secure.party import Party
from symprune.machine import durable
from symprune.maskset import MaskSet
from symprune.stats import Needs
from symprune.validation import has_kinds, parse_json

FILE = "state.safetensors"
VERSION = "7"
SETTINGS = {"number": int, "clients": int, "secure": bool, "noise": float, "clip": float}
SETTINGS |= {
    "needs": list,
    "aggregate": str,
    "gram_bits": int,
    "honest": int,
    "weights": bool,
    "recipe": str,
}
PACKED = ("counts", "values", "rests")


@dataclass
class State:
    """What a client remembers: the block it measured last, what it sent, and what comes next.

    What it sent is measured, with halves of Gram matrices if these were asked for, or, of a client
    that prunes alone, a ballot. Where Gram matrices are sent exactly, scale is the first sample's,
    which was sent first, and told what all clients agreed on. summed: it was in a secure sum of
    this text once, also after the run has ended. before and story: what everybody was told up to
    the block before, and up to this one.
    """

    settings: Settings | None = None
    block: int = -1
    hidden: Tensor | None = None
    party: Party | None = None
    measured: Packed | None = None
    halves: list[Half] = field(default_factory=list)
    scale: Tensor | None = None
    told: Tensor | None = None
    ballot: Ballot | None = None
    summed: bool = False
    before: bytes = b""
    story: bytes = b""

    @property
    def answered(self) -> bool:
        """Whether the block's first request was answered."""
        return not (self.measured is None and self.scale is None and self.ballot is None)

    def begin(self, block: int) -> None:
        """Nothing is measured in this block yet."""
        self.block, self.measured, self.halves = block, None, []
        self.scale = self.told = self.ballot = None
        self.before = self.story


def save(folder: Path, state: State) -> None:
    tensors: dict[str, Tensor] = {} if state.measured is None else dict(vars(state.measured))
    single = {"hidden": state.hidden, "scale": state.scale, "told": state.told}
    tensors |= {name: value for name, value in single.items() if value is not None}
    for number, half in enumerate(state.halves):
        tensors |= {f"sums {number}": half[0], f"rests {number}": half[1]}
    if state.ballot is not None:
        tensors["tokens"] = state.ballot.tokens
        tensors |= {f"kept {n}": kept for n, kept in enumerate(state.ballot.kept)}
        tensors |= {f"weights {n}": kept for n, kept in enumerate(state.ballot.weights)}
    plain: dict[str, Any] = {"block": state.block, "summed": state.summed}
    plain |= {"before": state.before.hex(), "story": state.story.hex()}
    if state.party is not None:
        plain["party"] = state.party.to_dict()
    if state.settings is not None:
        needs = state.settings.needs
        sides = [sorted(needs.inputs), sorted(needs.outputs)]
        recipe = state.settings.recipe
        told = "" if recipe is None else json.dumps(recipe.to_dict())
        needed = {"needs": [*sides, needs.token_limit], "recipe": told}
        plain["settings"] = {**vars(state.settings), **needed}
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
    if not has_kinds(plain, {"block": int, "summed": bool, "before": str, "story": str}):
        raise ValueError("it is not the state of a client")
    if "settings" in plain and not has_kinds(plain["settings"], SETTINGS):
        raise ValueError("what it was told is not complete")
    state = State(block=plain["block"], summed=plain["summed"])
    state.before, state.story = (bytes.fromhex(plain[name]) for name in ("before", "story"))
    if "party" in plain:
        state.party = Party.from_dict(plain["party"])
    state.hidden, state.scale, state.told = (tensors.get(n) for n in ("hidden", "scale", "told"))
    if "counts" in tensors:
        state.measured = Packed(**{name: tensors[name] for name in PACKED})
    pairs = zip(_numbered(tensors, "sums"), _numbered(tensors, "rests"), strict=True)
    state.halves = list(pairs)
    if "tokens" in tensors:
        kept, weights = _numbered(tensors, "kept"), _numbered(tensors, "weights")
        state.ballot = Ballot(tensors["tokens"], kept, weights)
    if "settings" in plain:
        inputs, outputs, limit = plain["settings"].pop("needs")
        needs = Needs(frozenset(inputs), frozenset(outputs), limit)
        recipe = read_recipe(plain["settings"].pop("recipe").encode())
        state.settings = Settings(needs=needs, recipe=recipe, **plain["settings"])
    return state


def _numbered(tensors: dict[str, Tensor], name: str) -> list[Tensor]:
    """`name 0`, `name 1`, ..."""
    count = sum(key.startswith(f"{name} ") for key in tensors)
    return [tensors[f"{name} {number}"] for number in range(count)]


def save_masks(
    folder: Path, block: int, masks: MaskSet, weights: Mapping[str, Tensor] | None = None
) -> None:
    """The masks of a block and, if it was updated, what they keep of it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    masks.save(folder / f"masks-{block:04d}.safetensors")
    if weights:
        file = folder / f"weights-{block:04d}.safetensors"
        durable.write_tensors(file, dict(weights), {}, mode=0o600)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """What the masks of all blocks so far keep of updated parameters, by name."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("weights-*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise SympruneError(f"The client's weights {file} are corrupt: {error}.") from error
    return weights


def load_masks(folder: Path) -> MaskSet:
    """The masks of all blocks so far."""
    masks = MaskSet()
    for file in sorted(folder.glob("masks-*.safetensors")):
        for name, keep in MaskSet.load(file).items():
            masks[name] = keep
    return masks


def put_kept(parameter: nn.Parameter, keep: Tensor, kept: Tensor) -> None:
    """Set what a mask keeps of a parameter."""
    where = keep.to(parameter.device)
    parameter.data[where] = kept.to(parameter.device, parameter.dtype)
