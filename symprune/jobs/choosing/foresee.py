"""The forecast of a comparison: every model opened, and a block of each timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from symprune import calibration
from symprune.checkpoint.load import load_computing, local_folder
from symprune.checkpoint.packed_shards import open_shards
from symprune.checkpoint.streamed_model import StreamedModel, stored_dtype
from symprune.engine.text.tokens import cap_seqlen
from symprune.eval.perplexity import cut
from symprune.jobs import streamed_perplexity
from symprune.jobs.bench import turns
from symprune.jobs.choosing.sources import Source
from symprune.jobs.estimate.forecast import Forecast
from symprune.jobs.estimate.loaded import MEASURE, forecast_recipes
from symprune.jobs.estimate.timed import InMemory, Place
from symprune.jobs.estimate.work import Work
from symprune.jobs.samples import NEW_TOKENS
from symprune.machine import compute, memory
from symprune.machine.capacity import Capacity
from symprune.models import hub

Clock = Callable[[], float]


class Asked(Protocol):
    """A comparison, as `compare` has it."""

    @property
    def data(self) -> str | None: ...
    @property
    def windows(self) -> int | None: ...
    @property
    def seqlen(self) -> int: ...
    @property
    def device(self) -> str: ...


def forecast_comparison(
    sources: Sequence[Source],
    asked: Asked,
    prompts: int,
    plan: turns.Plan | None,
    begun: float,
    clock: Clock = time.perf_counter,
) -> Forecast:
    """What comparing takes, one model after the other; begun: when the command did."""
    models = [source for source in sources if source.origin is not None]
    held, before = memory.now(), clock()
    found, masks, processes = list[Forecast](), 0, 0
    for source in models:
        place, load = _open(source, asked.device, clock)
        found.append(_forecast_one(source, place, load, asked, prompts, plan, masks, clock))
        masks += sum(m.parameter.numel() for m in place.layout.all_matrices())
        weights = sum(p.numel() for p in place.model.parameters())
        processes += held + weights * place.dtype.itemsize
        del place
    seconds: dict[str, float] = {}
    for each in found:
        for step, value in each.seconds.items():
            seconds[step] = seconds.get(step, 0.0) + value
    peak = max([held, *(each.memory for each in found)])
    if plan is not None:
        peak = max(peak, held + masks + processes)  # all are in memory, each in its process
    wheres = list(dict.fromkeys(each.where for each in found)) or ["by their records alone"]
    where = wheres[0] if len(wheres) == 1 else wheres[0].partition(", in ")[0]
    return Forecast(
        _describe(len(sources), asked, prompts, plan), where,
        Capacity.of(Path(), hub.pick_device(asked.device)), seconds,
        before - begun + clock() - before, peak, held,
    )  # fmt: skip


def _open(source: Source, device: str, clock: Clock) -> tuple[Place, float]:
    """A model on disk; what is not in safetensors files is loaded, which takes so many seconds."""
    assert source.origin is not None
    where, folder, begun = hub.pick_device(device), local_folder(source.origin), clock()
    if folder is None:
        model, _ = load_computing(source.origin, source.dtype, where, "auto", dequantize=False)
        return InMemory(model), clock() - begun
    shards, config = open_shards(folder), hub.load_config(source.origin)
    computed = compute.pick("auto", stored_dtype(source.dtype, config, shards), where)
    trusted = source.origin.access.trust_remote_code
    return StreamedModel(shards, config, source.dtype, where, trusted, computed), 0.0


def _forecast_one(
    source: Source,
    place: Place,
    load: float,
    asked: Asked,
    prompts: int,
    plan: turns.Plan | None,
    masks: int,
    clock: Clock,
) -> Forecast:
    """masks: bytes of those that are known by then."""
    seqlen, _ = cap_seqlen(place.model.config, asked.seqlen)
    ids = _read(source, asked.data or "builtin")
    windows = len(cut(ids, seqlen, asked.windows)) if asked.data is not None else 0
    at_once, looked = 1, 0
    if isinstance(place, StreamedModel):
        at_once, looked = streamed_perplexity.windows_at_once(place, seqlen, 1), 1
    work = Work(
        blocks=0, of_blocks=len(place.layout.blocks), windows=windows, measured=1,
        at_once=at_once, seqlen=seqlen, shown=prompts, new_tokens=NEW_TOKENS, writers=1,
        looked=looked,
        turns=plan.rounds + 1 if plan is not None else 0,
        turn_tokens=(plan.prompt_tokens, plan.new_tokens) if plan is not None else (0, 0),
    )  # fmt: skip
    found = forecast_recipes(
        place, [MEASURE], ids, work, what="", device=asked.device, folder=Path(), beside=masks,
        clock=clock,
    )  # fmt: skip
    return replace(found, seconds={**found.seconds, **({"loading": load} if load else {})})


def _read(source: Source, data: str) -> Tensor:
    assert source.origin is not None
    tokenizer: Any = hub.load_tokenizer(source.origin)
    return calibration.evaluation_tokens(data, tokenizer)


def _describe(count: int, asked: Asked, prompts: int, plan: turns.Plan | None) -> str:
    parts = [f"Comparing {count}"]
    if asked.data is not None:
        parts.append(f"perplexity on {asked.windows} windows of {asked.data}")
    if prompts:
        parts.append("1 prompt continued" if prompts == 1 else f"{prompts} prompts continued")
    if plan is not None:
        parts.append(f"speed in {plan.rounds} rounds")
    return ", ".join(parts)
