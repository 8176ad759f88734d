"""One job from a name to a folder: load, measure, prune, measure, write. What the commands call."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symprune import calibration, checkpoint, engine, hub
from symprune.eval.perplexity import Perplexity, perplexity
from symprune.recipe import Recipe

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A prune command: the recipe, and what is around it."""

    model: str
    recipe: Recipe
    output: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    evaluate: bool = True
    eval_data: str | None = None
    eval_windows: int | None = None
    force: bool = False

    @property
    def folder(self) -> Path:
        return self.output or Path(default_output(self.model, self.recipe))

    @property
    def held_out(self) -> str:
        """What perplexity is measured on: WikiText-2, unless the run is meant to need no hub."""
        return self.eval_data or (
            "builtin" if self.recipe.calibration == "builtin" else "wikitext2"
        )


def default_output(model: str, recipe: Recipe) -> str:
    """`smollm2-135m-ria-50` or `smollm2-135m-ria-2of4`, in the current folder."""
    name = Path(model).name.removesuffix(".gguf")
    amount = recipe.pattern.replace(":", "of") if recipe.pattern else f"{recipe.sparsity:.0%}"
    return re.sub(r"[^\w.+-]+", "-", f"{name}-{recipe.method}-{amount.rstrip('%')}")


def prune(
    job: Job,
    tell: Tell = lambda _: None,
    watch: engine.Watch = lambda *_: None,
    watch_eval: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Do the job and return its record, which is also `symprune.json` in the output folder.

    Whatever can fail cheaply comes first: the output folder, the texts, then the model.
    """
    checkpoint.check_output(job.folder, job.force)
    origin = hub.resolve(job.model)
    device = hub.pick_device(job.device)
    tell(f"Loading the tokenizer of {origin}")
    tokenizer = hub.load_tokenizer(origin)
    seqlen, notes = engine.cap_seqlen(hub.load_config(origin), job.recipe.seqlen)
    data: Any = tokenizer
    if job.recipe.criterion.needs:
        tell(f"Drawing calibration text from {job.recipe.calibration}")
        data = calibration.calibration_tokens(
            job.recipe.calibration, tokenizer, job.recipe.nsamples, seqlen, job.recipe.seed
        )
    held_out: Tensor | None = None
    if job.evaluate:
        held_out = calibration.encode(tokenizer, calibration.text(job.held_out, "test"))
    tell(f"Loading {origin}")
    model = hub.load_model(origin, job.dtype).to(device)
    checkpoint.check_output(job.folder, job.force, needed=_size(model))
    dense = _measure(job, model, held_out, seqlen, tell, watch_eval, "dense")
    tell(f"Pruning: {job.recipe.describe()}")
    report = engine.prune(model, data, job.recipe, watch)
    report.notes[:0] = notes
    pruned = _measure(job, model, held_out, seqlen, tell, watch_eval, "pruned")
    record = {
        "model": job.model,
        "origin": str(origin) if not origin.is_local else Path(str(origin)).name,
        "description": job.recipe.describe(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **report.to_dict(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device.type,
        "perplexity": _compare(job.held_out, dense, pruned),
    }
    tell(f"Writing {job.folder}")
    checkpoint.save(job.folder, model, tokenizer, record, report.masks, job.force)
    record["output"] = str(job.folder)
    record["output_bytes"] = checkpoint.folder_size(job.folder)
    return record


def _measure(
    job: Job,
    model: Any,
    held_out: Tensor | None,
    seqlen: int,
    tell: Tell,
    tick: Callable[[int, int], None],
    name: str,
) -> Perplexity | None:
    if held_out is None:
        return None
    tell(f"Perplexity of the {name} model on {job.held_out}")
    return perplexity(model, held_out, seqlen, job.eval_windows, tick)


def _compare(
    data: str, dense: Perplexity | None, pruned: Perplexity | None
) -> list[dict[str, Any]]:
    if dense is None or pruned is None:
        return []
    entry = {"data": data, "dense": dense.perplexity, "pruned": pruned.perplexity}
    return [{**entry, "windows": pruned.windows, "seqlen": pruned.seqlen}]


def _size(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def evaluate(
    model_name: str,
    data: str,
    seqlen: int,
    max_windows: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    tell: Tell = lambda _: None,
    tick: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Perplexity of a saved model on a held-out text, as a record."""
    origin = hub.resolve(model_name)
    where = hub.pick_device(device)
    seqlen, notes = engine.cap_seqlen(hub.load_config(origin), seqlen)
    tokenizer = hub.load_tokenizer(origin)
    ids = calibration.encode(tokenizer, calibration.text(data, "test"))
    tell(f"Loading {origin}")
    model = hub.load_model(origin, dtype).to(where)
    tell(f"Perplexity on {data}")
    result = perplexity(model, ids, seqlen, max_windows, tick)
    return {"model": model_name, "data": data, **result.to_dict(), "notes": notes}
