"""One job from a name to a folder: measure, prune, measure, write. What the commands call.

The model stays on disk: it is read, pruned and written block by block (`checkpoint`), and a job
that was interrupted goes on where it was (`checkpoint.resume`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symprune.calibration import files_of
from symprune.card.plan import Plan
from symprune.checkpoint import output_folder, resume
from symprune.checkpoint.device_map import check_device_map
from symprune.checkpoint.load import fingerprint
from symprune.checkpoint.output_files import OutputFiles
from symprune.checkpoint.packed_files import PackedFiles
from symprune.checkpoint.packed_shards import PackedShards
from symprune.checkpoint.record import read_record, versions, write_record
from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.checkpoint.streamed_model import Source, StreamedModel
from symprune.checkpoint.tensor_files import Shards
from symprune.engine import walk
from symprune.engine.arguments import Allocate
from symprune.engine.reconstruct import check_processes
from symprune.engine.text import bos
from symprune.engine.text.bos import Bos
from symprune.engine.visit.divided import divides_blocks
from symprune.errors import SympruneError
from symprune.eval.perplexity import cut
from symprune.jobs import samples, sizes, streamed_perplexity
from symprune.jobs.estimate.opening import Opened, choose_files, find_stored_dtype, open_model
from symprune.jobs.estimate.pruning import foresee
from symprune.jobs.experts.fewer import drop_first
from symprune.jobs.meter import LOG, Meter, Show
from symprune.jobs.own_text import add_own, open_whole
from symprune.jobs.preparation import (
    Prepared,
    Tell,
    Tick,
    add_output,
    compare,
    default_held_out,
    default_output,
    make_record,
    prepare,
)
from symprune.jobs.quality.against import diverge_from_input
from symprune.jobs.quality.divergence import WINDOWS
from symprune.jobs.quality.overlap import passages_of, warn
from symprune.jobs.sharing.plans import check_same_text, describe_run
from symprune.jobs.texts import Texts, describe_sources, read_texts
from symprune.machine import compute, distributed, durable, memory, offload
from symprune.masks import find_pattern
from symprune.maskset import MaskSet
from symprune.models import hub
from symprune.recipe import Recipe


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
    report_error: bool = False
    masks: Path | None = None
    restart: bool = False
    device_map: str | None = None
    offload: Path | None = None
    log: Path | None = None
    gram_device: str = "auto"
    batch_size: int | None = None
    access: hub.Access = field(default_factory=hub.Access)
    compute_dtype: str = "auto"
    keep_hashes: bool = True
    prompts: tuple[str, ...] = ()  # for the dense and the pruned model to continue
    repeats: Plan | None = None

    @property
    def folder(self) -> Path:
        return self.output or Path(default_output(self.model, self.recipe))

    @property
    def held_out(self) -> str:
        return self.eval_data or default_held_out([self.recipe.calibration])

    @property
    def reads(self) -> list[str]:
        """What may be files of the user's, which the output must not take the place of."""
        masks = [] if self.masks is None else [str(self.masks)]
        return [self.model, *files_of(self.recipe.calibration), *files_of(self.held_out), *masks]


def prune(
    job: Job,
    tell: Tell = lambda _: None,
    show: Show = lambda figures: None,
    watch_eval: Tick = lambda *_: None,
) -> dict[str, Any]:
    """Do the job and return its record; without times it is `symprune.json` in the output folder.

    Whatever can fail cheaply comes first: the settings, the texts, then the model.
    """
    memory.return_large_blocks()
    begun = time.perf_counter()
    durable.check_file(job.log, LOG)
    samples.check_prompts(job.prompts)
    check_device_map(job.device_map)
    if job.masks is not None:
        job.recipe.check_takes_masks()
    prepared = prepare(job, tell)
    origin, tokenizer, seqlen = prepared.origin, prepared.tokenizer, prepared.seqlen
    prompts = samples.fitting(job.prompts, tokenizer, prepared.config)
    device = distributed.start(prepared.device)
    check_processes(job.recipe)
    allocate = offload.allocate_in(job.offload) if job.offload else None
    base = MaskSet.load(job.masks) if job.masks else None
    measured = job.held_out if job.evaluate else None
    texts = read_texts(job.recipe, tokenizer, seqlen, measured, job.report_error, tell)
    run = describe_run(job, texts)
    check_same_text(job.repeats, run)
    owner = distributed.rank() == 0
    meter = Meter(seqlen, job.log if owner else None, show)
    with resume.workspace(job.folder, job.restart, owner) as work:
        computed = compute.pick(
            job.compute_dtype, find_stored_dtype(job, origin, prepared.config), device
        )
        facts = _facts(job, prepared, computed, texts, base, device)
        if not owner:
            distributed.wait()
        progress = resume.Progress.open(work, facts, job.folder, owner)
        whole = open_model(job, origin, computed, device, work, job.device_map, tell)
        for sentence in foresee(job, whole, texts, seqlen, begun, progress.finished):
            tell(sentence)
        if not isinstance(whole.shards, PackedShards):  # has checksums of its own
            resume.watch_input(progress, whole.shards)
        fewer = drop_first(job, whole, texts, tokenizer, work, allocate, tell)
        opened = fewer.opened if fewer else whole
        files = _create_files(job, opened, base, work, progress, tell)
        if owner:
            distributed.wait()
        blocks = StreamedBlocks(opened.streamed, files, progress, allocate)
        blocks.at_once = job.batch_size or blocks.once(
            "batch size", lambda: opened.streamed.batch_size(seqlen)
        )
        found = _decide_bos(job, whole.streamed, tokenizer, blocks, texts)
        write = partial(open_whole, opened.shards, opened.streamed, job.dtype, job.access)
        texts = add_own(job.recipe, write, tokenizer, blocks, texts, found, tell)
        overlap = warn(texts.data, texts.held_out, job.held_out, seqlen, job.eval_windows)
        for note in overlap:
            tell(note)
        ruler = _Ruler(
            job, whole.streamed, opened.streamed, texts, seqlen, allocate, tell, watch_eval
        )
        dense = blocks.once(f"dense {ruler}", ruler.measure)
        tell(_describe_memory(job.recipe, opened.streamed, texts, seqlen))
        tell(_say_what_begins(job, progress, len(blocks)))
        report = walk.prune(
            opened.streamed.model, texts.data, job.recipe,
            watch=meter, report_error=job.report_error, base=base, blocks=blocks,
            held_out=texts.watched, written=texts.written, gram_device=job.gram_device, tell=tell,
        )  # fmt: skip
        report.bos = found
        report.experts = fewer.described if fewer else None
        first = [*prepared.notes, *(fewer.notes if fewer else ())]
        said = [*first, *(found.notes if found else ()), *report.notes, *overlap]
        report.notes[:] = list(dict.fromkeys(said))
        if owner:
            tell(f"Writing {job.folder}")
            output_folder.write_around(
                files.folder, opened.folder, opened.streamed.model, tokenizer, job.dtype
            )
            files.write_rest()
        distributed.wait()
        pruned = blocks.once(f"pruned {ruler}", lambda: ruler.measure(files.open_written()))
        apart = blocks.once(f"pruned apart {ruler}", lambda: ruler.diverge(files.open_written()))
        figures = [] if dense is None or pruned is None else [compare(job.held_out, dense, pruned)]
        figures = [{**figure, "divergence": apart} for figure in figures]
        shown = {}
        if owner and job.prompts:
            both = {
                "dense": (whole.shards, whole.streamed.model.config),
                "pruned": (files.open_written(), opened.streamed.model.config),
            }
            continued, why = samples.of_run(
                job, prompts, whole.streamed, both, tokenizer, texts.bos, tell
            )
            shown["samples"] = continued
            report.notes += why
        record = make_record(
            job, prepared, job.recipe.describe(), report.to_dict(),
            dtype=opened.streamed.dtype, computed=computed, perplexity=figures,
            bits_per_weight=files.bits_per_weight(),
        )  # fmt: skip
        record["calibration"] = describe_sources(job.recipe, texts)
        record |= passages_of(texts.data) if job.keep_hashes else {}
        found_sizes = sizes.of_run(origin, whole.folder, whole.shards, files.folder)
        record |= {**run, **found_sizes, **shown}
        if owner:
            write_record(files.folder, record, packed=isinstance(files, PackedFiles))
    meter.close()
    distributed.wait()
    return add_output(record, origin, job.folder)


def _facts(
    job: Job,
    prepared: Prepared,
    computed: torch.dtype,
    texts: Texts,
    base: MaskSet | None,
    device: torch.device,
) -> dict[str, Any]:
    """Everything the output depends on."""
    data, watched = texts.data, texts.watched
    return {
        **fingerprint(prepared.origin, prepared.tokenizer),
        "revision": prepared.revision,
        "trust_remote_code": job.access.trust_remote_code,
        "recipe": job.recipe.to_dict(),
        "calibration tokens": resume.digest(data) if isinstance(data, Tensor) else None,
        "watched tokens": None if watched is None else resume.digest(watched),
        "masks": resume.digest(*(base.bits(name) for name in base)) if base else None,
        "report_error": job.report_error,
        "batch_size": job.batch_size,
        "dtype": job.dtype,
        "compute_dtype": compute.name_of(computed),
        "device": device.type,
        "processes": distributed.size(),
        "versions": versions(),
    }


def _create_files(
    job: Job,
    opened: Opened,
    base: MaskSet | None,
    work: Path,
    progress: resume.Progress,
    tell: Tell,
) -> OutputFiles | PackedFiles:
    """The output's files, begun, or taken up where an earlier attempt left them."""
    files = choose_files(job.recipe, opened, work, job.dtype == "auto")
    layout = opened.streamed.layout
    if base is not None:
        base.check_fits({m.parameter_name: m.parameter for m in layout.all_matrices()})
    if distributed.rank() == 0:
        _take_up(job, files, progress, tell)
    return files


def _take_up(
    job: Job, files: OutputFiles | PackedFiles, progress: resume.Progress, tell: Tell
) -> None:
    """Go on with what an earlier attempt wrote, as far as it is still that; else begin."""
    finished = progress.finished
    kept = files.take_up(finished, progress.written) if finished else 0
    if kept < finished:
        tell(f"Block {kept + 1} is not as it was written, so the run goes on from there.")
        progress.go_back(kept)
    if kept == 0:
        output_folder.check_room(job.folder, files.size)
        progress.restart()
        files.create()


def _decide_bos(
    job: Job, streamed: StreamedModel, tokenizer: Any, blocks: StreamedBlocks, texts: Texts
) -> Bos | None:
    """Whether windows begin with BOS, decided once for a run; None if there are no windows."""
    if not isinstance(texts.data, Tensor) and texts.held_out is None:
        return None

    def decide_once() -> dict[str, Any]:
        losses = streamed_perplexity.losses_of(streamed)
        return bos.decide(job.recipe.bos, tokenizer, streamed.model.config, losses).to_dict()

    return Bos(**blocks.once("bos", decide_once))


def _describe_memory(recipe: Recipe, streamed: StreamedModel, texts: Texts, seqlen: int) -> str:
    """What type blocks are computed in, and what they and the hidden states take in it."""
    which = compute.describe(streamed.compute, streamed.dtype, streamed.device)
    said = f"Computing in {which}: {streamed.block_size / 1e6:,.1f} MB for a block"
    samples = sum(len(part) for part in (texts.data, texts.watched) if isinstance(part, Tensor))
    processes = 1 if divides_blocks(recipe) else distributed.size()
    states = streamed.states_size(samples // processes, seqlen)
    return f"{said}, {states / 1e6:,.1f} MB for the hidden states" if samples else said


def _say_what_begins(job: Job, progress: resume.Progress, blocks: int) -> str:
    if progress.finished:
        return f"Going on after block {progress.finished} of {blocks}: {job.recipe.describe()}"
    return f"Pruning: {job.recipe.describe()}"


@dataclass(frozen=True)
class _Ruler:
    """Measures perplexity before and after, if that is wanted."""

    job: Job
    dense: StreamedModel
    streamed: StreamedModel
    texts: Texts
    seqlen: int
    allocate: Allocate | None
    tell: Tell
    tick: Tick

    def __str__(self) -> str:
        ids = self.texts.held_out
        text = None if ids is None else resume.digest(ids)
        return f"{self.job.held_out} {self.job.eval_windows} {text}"

    def measure(self, pruned: Shards | None = None) -> dict[str, float] | None:
        ids = self.texts.held_out
        if ids is None:
            return None
        which, streamed = ("pruned", self.streamed) if pruned else ("dense", self.dense)
        self.tell(f"Perplexity of the {which} model on {self.job.held_out}")
        at_once = streamed_perplexity.windows_at_once(
            streamed, self.seqlen, self.job.recipe.nsamples
        )
        return streamed_perplexity.perplexity(
            streamed, ids, self.seqlen, self.job.eval_windows, self.tick, pruned,
            at_once, self.allocate, self.texts.bos,
        ).to_dict()  # fmt: skip

    def diverge(self, written: Source) -> dict[str, float] | None:
        """How far the pruned model is from the dense one, on the first windows of the text."""
        if self.texts.held_out is None:
            return None
        self.tell(f"Comparing both models on {self.job.held_out}")
        count = min(self.job.eval_windows or WINDOWS, WINDOWS)
        windows = cut(self.texts.held_out, self.seqlen, count, self.texts.bos)
        trusted, config = self.job.access.trust_remote_code, self.streamed.model.config
        return diverge_from_input(
            self.dense, written, config, self.job.dtype, trusted, windows, self.tick, self.allocate
        )


def recipe_of(masks: Path, method: str | None = None) -> Recipe:
    """The recipe behind saved masks: from the record beside them, else what they show. method is
    that of the recipe, if not the one it names."""
    folder = masks if masks.is_dir() else masks.parent
    record = read_record(folder)
    if record is not None:
        made = record.get("recipe")
        if not isinstance(made, dict):
            raise SympruneError(f"The record in {folder} has no recipe.")
        if method is not None and method != made.get("method"):
            made = {**made, "method": method, "params": {}}
        return Recipe.from_dict(made)
    found = MaskSet.load(masks)
    return Recipe(method or "ria", pattern=find_pattern(found[next(iter(found))]))
