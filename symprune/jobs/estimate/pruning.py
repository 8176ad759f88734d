"""The forecast of a prune or refine command: its first block timed, and what that comes to."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from torch import Tensor

from symprune.checkpoint.streamed_model import StreamedModel
from symprune.engine.experts.mixtures import plan_drop
from symprune.engine.predictions import step_between
from symprune.engine.text import self_written
from symprune.jobs.estimate.forecast import OFFLOAD, Forecast, attempt
from symprune.jobs.estimate.loaded import count_words, sizes_of
from symprune.jobs.estimate.opening import Opened, choose_files, find_stored_dtype, open_model
from symprune.jobs.estimate.room import count_memory
from symprune.jobs.estimate.timed import Clock, Timed, time_block, why
from symprune.jobs.estimate.work import Seconds, Work, count_seconds
from symprune.jobs.preparation import Request, Tell, prepare
from symprune.jobs.samples import NEW_TOKENS, why_not
from symprune.jobs.streamed_perplexity import windows_at_once
from symprune.jobs.texts import Texts, read_texts
from symprune.machine import compute, distributed, memory
from symprune.machine.capacity import Capacity
from symprune.maskset import MaskSet
from symprune.recipe import Recipe


class Job(Request, Protocol):
    """A prune or refine command, as `jobs.pruning` has it."""

    @property
    def evaluate(self) -> bool: ...
    @property
    def eval_windows(self) -> int | None: ...
    @property
    def held_out(self) -> str: ...
    @property
    def report_error(self) -> bool: ...
    @property
    def masks(self) -> Path | None: ...
    @property
    def device_map(self) -> str | None: ...
    @property
    def offload(self) -> Path | None: ...
    @property
    def gram_device(self) -> str: ...
    @property
    def prompts(self) -> tuple[str, ...]: ...


def forecast_pruning(
    recipe: Recipe,
    streamed: StreamedModel,
    texts: Texts,
    seqlen: int,
    *,
    folder: Path,
    device: str,
    eval_windows: int | None,
    disk: int,
    spent: float = 0.0,
    finished: int = 0,
    report_error: bool = False,
    offloaded: bool = False,
    gram_device: str = "auto",
    prompts: int = 0,
    clock: Clock = time.perf_counter,
) -> Forecast:
    """What a run takes whose texts are read and whose model is opened. disk: bytes it will write;
    spent: seconds that have passed; finished: blocks an earlier attempt has done."""
    windows = 0
    if texts.held_out is not None:
        windows = len(texts.held_out) // seqlen
        windows = windows if eval_windows is None else min(windows, eval_windows)
    tokens = texts.data if isinstance(texts.data, Tensor) else None
    watched = 0 if texts.watched is None else len(texts.watched)
    probe = None if tokens is None else tokens.clamp(min=0)  # some may not be written yet
    if probe is None and texts.held_out is not None:
        probe = texts.held_out[:seqlen][None]
    samples = 0 if tokens is None else len(tokens)
    weights = sum(p.numel() for p in streamed.model.parameters()) * streamed.compute.itemsize
    shown = 0 if why_not(streamed.model, weights, streamed.device) else prompts
    work = Work(
        blocks=len(streamed) - finished,
        of_blocks=len(streamed),
        samples=samples,
        written=recipe.self_samples or 0,
        unwritten=0 if tokens is None else self_written.count_unwritten(tokens, texts.watched),
        together=self_written.windows_at_once(streamed.model, seqlen, streamed.compute),
        held_out=watched,
        windows=windows,
        measured=1 if finished else 2,
        at_once=windows_at_once(streamed, seqlen, recipe.nsamples),
        seqlen=seqlen,
        predicted=1 / step_between(seqlen, count_words(streamed.model)),
        processes=distributed.size(),
        report_error=report_error,
        shown=shown,
        new_tokens=NEW_TOKENS,
    )
    held = memory.now()
    begun = clock()
    head = (
        windows > 0
        or shown > 0
        or recipe.allocation is not None
        or recipe.trains_predictions
        or work.written + work.unwritten > 0
    )
    timed = time_block(streamed, probe, recipe, report_error, clock, head=head)
    seconds = count_steps(recipe, work, timed)
    sizes = sizes_of(streamed, timed, seqlen, held)
    sharing = 1 if recipe.trains_apart else work.processes
    mine = -(-(samples + work.written) // sharing)
    peak = count_memory(
        recipe, sizes,
        samples=mine, held_out=-(-watched // sharing), report_error=report_error,
        at_once=min(work.at_once, -(-windows // work.processes)),
        states_in_memory=not offloaded, grams_in_memory=gram_device != "disk",
        writes=shown + work.unwritten > 0,
        cache=min(work.together, work.written + work.unwritten)
        * self_written.size_of_cache(streamed.model, seqlen, streamed.compute),
    )  # fmt: skip
    if offloaded:
        disk += (mine + watched) * sizes.window
    where = why(streamed.at, device, streamed.compute, streamed.dtype)
    return Forecast(
        describe(recipe, work), where, Capacity.of(folder, streamed.at), seconds.steps,
        spent + clock() - begun, peak, held, disk, OFFLOAD,
    )  # fmt: skip


def foresee(
    job: Job, opened: Opened, texts: Texts, seqlen: int, begun: float, finished: int
) -> list[str]:
    """What the run will do and take, as sentences; an error where it cannot fit. Nothing is said of
    a model that cannot be timed: what is wrong with it is said where it is met."""
    if finished >= len(opened.streamed):
        return []
    spent = time.perf_counter() - begun
    found = attempt(lambda: make_forecast(job, opened, texts, seqlen, spent, finished))
    if found is None:
        return []
    found.check()
    return found.sentences()


def make_forecast(
    job: Job,
    opened: Opened,
    texts: Texts,
    seqlen: int,
    spent: float,
    finished: int = 0,
    clock: Clock = time.perf_counter,
) -> Forecast:
    """What a run takes from here; spent: seconds that have passed."""
    work = job.folder.parent / f".{job.folder.name}.partial"
    disk = 0 if finished else choose_files(job.recipe, opened, work, job.dtype == "auto").size
    found = forecast_pruning(
        job.recipe, opened.streamed, texts, seqlen,
        folder=job.folder, device=job.device, disk=disk, spent=spent, finished=finished,
        eval_windows=job.eval_windows, report_error=job.report_error,
        offloaded=job.offload is not None, gram_device=job.gram_device, clock=clock,
        prompts=len(job.prompts),
    )  # fmt: skip
    drop = job.recipe.fewer_experts
    if drop is None:
        return found
    plan_drop(opened.streamed.model.config, drop)
    return _with_whole_model(found, opened)


def _with_whole_model(found: Forecast, opened: Opened) -> Forecast:
    """The forecast of a run that first writes the model with fewer experts, from memory."""
    weights = sum(p.numel() for p in opened.streamed.model.parameters())
    size = weights * opened.streamed.dtype.itemsize
    return replace(found, memory=max(found.memory, found.held + size), disk=found.disk + size)


def forecast(job: Job, tell: Tell = lambda _: None, clock: Clock = time.perf_counter) -> Forecast:
    """What `prune` would do and take. Nothing is written but, for as long as it lasts, the weights
    of a model that is not in safetensors files."""
    begun = clock()
    if job.masks is not None:
        job.recipe.check_takes_masks()
        MaskSet.load(job.masks)
    prepared = prepare(job, tell)
    measured = job.held_out if job.evaluate else None
    texts = read_texts(
        job.recipe, prepared.tokenizer, prepared.seqlen, measured, job.report_error, tell
    )
    stored = find_stored_dtype(job, prepared.origin, prepared.config)
    computed = compute.pick(job.compute_dtype, stored, prepared.device)
    with TemporaryDirectory() as work:
        opened = open_model(
            job, prepared.origin, computed, prepared.device, Path(work), job.device_map, tell
        )
        tell("Timing the first block")
        return make_forecast(job, opened, texts, prepared.seqlen, clock() - begun, clock=clock)


def count_steps(recipe: Recipe, work: Work, timed: Timed) -> Seconds:
    """The seconds of each step, in as many groups as the block turned out to have."""
    return count_seconds(recipe, replace(work, groups=timed.groups), timed.pace)


def describe(recipe: Recipe, work: Work) -> str:
    """What will be done."""
    parts = [recipe.describe()]
    blocks = f"{work.of_blocks} blocks"
    parts.append(blocks if work.blocks == work.of_blocks else f"{work.blocks} of {blocks} left")
    if work.samples:
        parts.append(f"{work.samples} windows of {work.seqlen} tokens")
    if work.windows:
        parts.append(f"perplexity on {work.windows}")
    return ", ".join(parts)
