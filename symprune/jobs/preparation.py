"""What every pruning job does before and after the pruning itself, whoever has the text: the part
that `prune` and `fed prune` share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from symprune import calibration
from symprune.card.base import describe_base
from symprune.checkpoint.load import local_folder
from symprune.checkpoint.output_folder import check_output, folder_size
from symprune.checkpoint.packed import weight_files
from symprune.engine.text.tokens import cap_seqlen
from symprune.eval.perplexity import cut
from symprune.machine import compute
from symprune.models import hub
from symprune.recipe import Recipe
from symprune.validation import check_choice

Tell = Callable[[str], None]
Tick = Callable[[int, int], None]


class Request(Protocol):
    """What a command was asked to do, whichever it is."""

    @property
    def model(self) -> str: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def folder(self) -> Path: ...
    @property
    def force(self) -> bool: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def compute_dtype(self) -> str: ...
    @property
    def access(self) -> hub.Access: ...
    @property
    def reads(self) -> list[str]: ...


@dataclass(frozen=True)
class Prepared:
    """A job whose settings are known to be good, and its model without weights."""

    origin: hub.Origin
    revision: str | None
    config: Any
    tokenizer: Any
    device: torch.device
    seqlen: int
    notes: list[str]


def prepare(job: Request, tell: Tell) -> Prepared:
    """Whatever can fail cheaply comes first: the output folder, the settings, then the model."""
    check_output(job.folder, job.force, job.reads)
    hub.check_dtype(job.dtype)
    check_choice("compute-dtype", job.compute_dtype, compute.CHOICES)
    origin, device = hub.resolve(job.model, job.access), hub.pick_device(job.device)
    config = hub.load_config(origin)
    seqlen, notes = cap_seqlen(config, job.recipe.seqlen)
    tell(f"Loading the tokenizer of {job.model}")
    tokenizer = hub.load_tokenizer(origin)
    return Prepared(origin, hub.version_of(origin), config, tokenizer, device, seqlen, notes)


def default_output(model: str, recipe: Recipe) -> str:
    """`smollm2-135m-ria-50`, `smollm2-135m-ria-2of4-int4` or `smollm2-135m-int4`, in the current
    folder."""
    amount = recipe.pattern.replace(":", "of") if recipe.pattern else f"{recipe.sparsity:.0%}"
    parts = [Path(model).name.removesuffix(".gguf")]
    if recipe.experts is not None:
        parts.append(f"experts-{recipe.experts}".replace(":", "-").rstrip("%"))
    parts += [] if recipe.keeps_all else [recipe.method, amount.rstrip("%")]
    parts += [] if recipe.rounding is None else [recipe.rounding.name]
    return re.sub(r"[^\w.+-]+", "-", "-".join(parts))


def default_held_out(calibrated_on: Iterable[str]) -> str:
    """What perplexity is measured on: WikiText-2, unless the run is meant to need no hub."""
    return "builtin" if all(map(calibration.needs_no_hub, calibrated_on)) else "wikitext2"


def read_held_out(data: str, tokenizer: Any, seqlen: int) -> Tensor:
    """The text perplexity is measured on, as one row of tokens, enough for a window."""
    ids = calibration.evaluation_tokens(data, tokenizer)
    cut(ids, seqlen)
    return ids


def compare(data: str, dense: Mapping[str, Any], pruned: Mapping[str, Any]) -> dict[str, Any]:
    """Perplexity before and after, as the record has it."""
    entry = {"data": data, "dense": dense["perplexity"], "pruned": pruned["perplexity"]}
    return {**entry, "windows": pruned["windows"], "seqlen": pruned["seqlen"]}


def make_record(
    job: Request,
    prepared: Prepared,
    description: str,
    report: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    computed: torch.dtype,
    perplexity: list[dict[str, Any]],
    bits_per_weight: float | None = None,
) -> dict[str, Any]:
    """What was done; without times it is `symprune.json` in the output folder."""
    origin = prepared.origin
    return {
        "model": job.model,
        "origin": str(origin) if not origin.is_local else Path(str(origin)).name,
        "revision": prepared.revision,
        "base": name_base(origin),
        "description": description,
        **report,
        "dtype": compute.name_of(dtype),
        "compute_dtype": compute.name_of(computed),
        "device": prepared.device.type,
        "bits_per_weight": bits_per_weight or 8 * dtype.itemsize,
        "perplexity": perplexity,
    }


def name_base(origin: hub.Origin) -> dict[str, Any]:
    """The model by a name that tells no folder of this machine, and what is known of it."""
    short = hub.SHORT_NAMES.get(origin.name.lower())
    if origin.gguf_file:
        file = Path(origin.path) / origin.gguf_file
        name = origin.name if short else file.name
        return describe_base(name, None, file, short)
    if origin.is_local:
        return describe_base(Path(origin.path).resolve().name, Path(origin.path), None, None)
    return describe_base(origin.name, local_folder(origin), None, origin.path)


def add_output(record: dict[str, Any], origin: hub.Origin, folder: Path) -> dict[str, Any]:
    """The record with where the model is, what it takes there, and what it took before."""
    found = {**record, "output": str(folder), "output_bytes": folder_size(folder)}
    if origin.gguf_file:
        found["input_bytes"] = (Path(origin.path) / origin.gguf_file).stat().st_size
    elif origin.is_local:
        files = (Path(origin.path) / name for name in weight_files(Path(origin.path)))
        found["input_bytes"] = sum(path.stat().st_size for path in files)
    return found
