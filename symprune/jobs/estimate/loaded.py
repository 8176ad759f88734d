"""The forecast of what is done with a model in memory, many times maybe, and of measuring one."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from symprune.jobs.estimate.forecast import Forecast
from symprune.jobs.estimate.room import Sizes, count_memory
from symprune.jobs.estimate.timed import WINDOWS, Clock, InMemory, Place, Timed, time_block, why
from symprune.jobs.estimate.work import Work, count_seconds
from symprune.machine import memory
from symprune.machine.capacity import Capacity
from symprune.recipe import Recipe

MEASURE = Recipe("magnitude")  # of which no block is pruned


def forecast_recipes(
    place: Place,
    recipes: Sequence[Recipe],
    ids: Tensor,
    work: Work,
    *,
    what: str,
    device: str,
    folder: Path,
    disk: int = 0,
    beside: int = 0,
    spent: float = 0.0,
    clock: Clock = time.perf_counter,
) -> Forecast:
    """What it takes to prune the model by each recipe in turn and to measure it each time. ids: a
    row of tokens to time with; work: of one of them, `measured` times once more in the beginning;
    disk: bytes that are written; beside: bytes that are held beside what the work needs; spent:
    seconds that have passed."""
    held, begun = memory.now(), clock()
    count = min(WINDOWS, len(ids) // work.seqlen)
    tokens = ids[: count * work.seqlen].view(count, work.seqlen) if count else None
    timed: dict[str, Timed] = {}
    seconds: dict[str, float] = {}
    peak, in_memory = held, isinstance(place, InMemory)
    for number, recipe in enumerate(recipes):
        named = json.dumps({k: v for k, v in recipe.to_dict().items() if "seed" not in k})
        if named not in timed:
            found = time_block(place, tokens, recipe, work.report_error, clock)
            load = 0.0 if in_memory else found.pace.load
            timed[named] = replace(found, pace=replace(found.pace, load=load, write=0.0))
        found = timed[named]
        once = replace(work, groups=found.groups, measured=work.measured if number == 0 else 1)
        for step, value in count_seconds(recipe, once, found.pace).steps.items():
            seconds[step] = seconds.get(step, 0.0) + value
        sizes = sizes_of(place, found, work.seqlen, held + beside)
        peak = max(
            peak,
            count_memory(
                recipe, sizes, samples=work.samples, held_out=work.held_out,
                at_once=1 if in_memory else work.at_once, report_error=work.report_error,
                writes=work.shown > 0,
            ),
        )  # fmt: skip
    computed = place.model.get_input_embeddings().weight.dtype
    return Forecast(
        what, why(place.at, device, computed, place.dtype), Capacity.of(folder, place.at), seconds,
        spent + clock() - begun, peak, held, disk,
    )  # fmt: skip


def count_words(model: Any) -> int:
    """The tokens of its vocabulary."""
    return int(model.get_input_embeddings().weight.shape[0])


def sizes_of(place: Place, timed: Timed, seqlen: int, held: int) -> Sizes:
    """Where the model is in memory, it is held already."""
    layout = place.layout
    embeddings = place.model.get_input_embeddings().weight
    each = embeddings.element_size()
    blocks = [sum(p.numel() for p in block.parameters()) for block in layout.blocks]
    around = sum(p.numel() for p in place.model.parameters()) - sum(blocks)
    there = 0 if isinstance(place, InMemory) else each
    return Sizes(
        block=max(blocks) * there,
        blocks=sum(blocks) * there,
        around=around * there,
        window=seqlen * int(embeddings.shape[1]) * each,
        largest=max((m.weight.numel() for m in layout.matrices(0)), default=0),
        weights=max(blocks),
        widths=timed.widths,
        way_back=timed.way_back,
        vocabulary=count_words(place.model),
        seqlen=seqlen,
        held=held,
        most=memory.peak(),
    )
