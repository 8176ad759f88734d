"""A model on disk without the experts that say least: a folder of its own, pruned on from there.

What the experts do is measured block by block. The folder is written from the whole model in
memory, in its stored type: how a family's experts lie in its files is transformers' knowledge.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from symprune.checkpoint.load import load_model
from symprune.checkpoint.output_folder import files_around
from symprune.engine.arguments import Allocate
from symprune.engine.experts.drop import check_processes, describe, kept_of, take_out
from symprune.engine.experts.mixtures import COUNTS, TOP_K, Plan, plan_drop
from symprune.engine.text import bos
from symprune.errors import SympruneError
from symprune.experts import Drop
from symprune.jobs import streamed_perplexity
from symprune.jobs.estimate.opening import Opened, open_folder
from symprune.jobs.experts.load import pass_through
from symprune.jobs.preparation import Request
from symprune.jobs.texts import Texts
from symprune.machine import durable, memory
from symprune.machine.checksums import is_whole, write_checksums
from symprune.models import hub
from symprune.validation import parse_json

FOLDER, MEASURED = "fewer-experts", "experts.json"


@dataclass(frozen=True)
class Fewer:
    """The model without those experts, what was measured and done, and notes."""

    opened: Opened
    described: dict[str, Any]
    notes: list[str]


class Job(Request, Protocol):
    """A prune command."""

    @property
    def device_map(self) -> str | None: ...


def drop_first(
    job: Job,
    whole: Opened,
    texts: Texts,
    tokenizer: Any,
    work: Path,
    allocate: Allocate | None,
    tell: Callable[[str], None],
) -> Fewer | None:
    """The model without the experts the recipe drops, if it drops any."""
    drop = job.recipe.fewer_experts
    if drop is None:
        return None
    losses = streamed_perplexity.losses_of(whole.streamed)
    found = bos.decide(job.recipe.bos, tokenizer, whole.streamed.model.config, losses)
    tokens = texts.begin_with(found).data
    return open_fewer(job, drop, whole, tokens, tokenizer, work, allocate, tell)


def open_fewer(
    job: Job,
    drop: Drop,
    whole: Opened,
    tokens: Tensor,
    tokenizer: Any,
    work: Path,
    allocate: Allocate | None,
    tell: Callable[[str], None],
) -> Fewer:
    """The model without the experts that say least on `tokens`, in a folder in `work`; one that an
    earlier attempt made and that is as it was is kept."""
    check_processes()
    streamed, folder = whole.streamed, work / FOLDER
    plan = plan_drop(streamed.model.config, drop)
    if not is_whole(folder):
        weights = sum(p.numel() for p in streamed.model.parameters()) * streamed.dtype.itemsize
        _check_room(weights)
        tell(f"Measuring {plan.count} experts a layer on {len(tokens)} windows")
        described = describe(plan, pass_through(streamed, plan.count, tokens, allocate))
        tell(
            f"Writing the model with {plan.left} of {plan.count} experts a layer; for that it is "
            f"in memory as a whole, {weights / 1e6:,.1f} MB"
        )
        _write(job, whole.folder, folder, plan, described, tokenizer)
    described = parse_json((folder / MEASURED).read_text())
    opened = open_folder(job, folder, streamed.compute, streamed.device, job.device_map)
    return Fewer(opened, described, plan.notes())


def _check_room(size: int) -> None:
    free = memory.free(torch.device("cpu"))
    if size > free:
        raise SympruneError(
            f"To drop experts the model must be in memory as a whole: {size / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free."
        )


def _write(
    job: Request, source: Path, folder: Path, plan: Plan, described: dict[str, Any], tokenizer: Any
) -> None:
    new = folder.with_name(f"{folder.name}.new")
    for left in filter(Path.is_dir, (folder, new)):
        shutil.rmtree(left)
    model = load_model(hub.Origin(job.model, str(source), access=job.access), job.dtype)
    described["weights"] = take_out(model, plan, kept_of(described))
    model.save_pretrained(new)
    for path in filter(Path.is_file, (source / name for name in files_around(source, tokenizer))):
        shutil.copyfile(path, new / path.name)
    config = parse_json((source / "config.json").read_text())
    config.pop("quantization_config", None)  # of a packed source; the copy is plain
    text = json.dumps(_with_fewer(config, model.config, plan), indent=2)
    durable.write_text(new / "config.json", text + "\n")
    durable.write_text(new / MEASURED, json.dumps(described) + "\n")
    write_checksums(new)
    durable.sync_tree(new)
    new.rename(folder)
    durable.sync(folder.parent)


def _with_fewer(config: dict[str, Any], model_config: Any, plan: Plan) -> dict[str, Any]:
    """The configuration as its file has it, with other numbers under every name they have in it."""
    same_as = model_config.attribute_map
    numbers = {COUNTS[model_config.model_type]: plan.left, TOP_K: plan.top_k}
    changed = dict(config)
    for name, number in numbers.items():
        alike = [other for other in config if same_as.get(other, other) == same_as.get(name, name)]
        changed |= dict.fromkeys(alike or [name], number)
    return changed
