"""One job from a name to a folder: measure, prune, measure, write. What the commands call.

The model stays on disk: it is read, pruned and written block by block (`checkpoint`), and a job
that was interrupted goes on where it was (`checkpoint.resume`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symprune.checkpoint import output_folder, resume
from symprune.checkpoint.device_map import check_device_map, choose_devices
from symprune.checkpoint.load import fingerprint, local_folder, make_dense_copy
from symprune.checkpoint.output_files import OutputFiles
from symprune.checkpoint.packed import PARTS
from symprune.checkpoint.packed_files import PackedFiles
from symprune.checkpoint.packed_shards import PackedShards, open_shards
from symprune.checkpoint.record import read_record, versions, write_record
from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.checkpoint.streamed_model import StreamedModel, stored_dtype
from symprune.checkpoint.tensor_files import Shards
from symprune.engine import forward, walk
from symprune.engine.arguments import Allocate
from symprune.engine.reconstruct import check_processes
from symprune.engine.text import bos
from symprune.engine.text.bos import Bos
from symprune.engine.text.self_written import check_can_write, check_room, write_windows
from symprune.errors import SympruneError
from symprune.jobs import streamed_perplexity
from symprune.jobs.meter import LOG, Meter, Show
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
from symprune.jobs.texts import Texts, read_texts
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
        return [self.model, self.recipe.calibration, self.held_out, *masks]


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
    durable.check_file(job.log, LOG)
    check_device_map(job.device_map)
    if job.masks is not None:
        job.recipe.check_takes_masks()
    prepared = prepare(job, tell)
    origin, tokenizer, seqlen = prepared.origin, prepared.tokenizer, prepared.seqlen
    device = distributed.start(prepared.device)
    check_processes(job.recipe)
    allocate = offload.allocate_in(job.offload) if job.offload else None
    base = MaskSet.load(job.masks) if job.masks else None
    measured = job.held_out if job.evaluate else None
    texts = read_texts(job.recipe, tokenizer, seqlen, measured, job.report_error, tell)
    owner = distributed.rank() == 0
    meter = Meter(seqlen, job.log if owner else None, show)
    with resume.workspace(job.folder, job.restart, owner) as work:
        computed = compute.pick(
            job.compute_dtype, _stored_dtype(job, origin, prepared.config), device
        )
        facts = _facts(job, prepared, computed, texts, base, device)
        if not owner:
            distributed.wait()
        progress = resume.Progress.open(work, facts, job.folder, owner)
        opened = _open(job, origin, computed, device, work, tell)
        if not isinstance(opened.shards, PackedShards):  # has checksums of its own
            resume.watch_input(progress, opened.shards)
        files = _create_files(job, opened, base, work, progress, tell)
        if owner:
            distributed.wait()
        blocks = StreamedBlocks(opened.streamed, files, progress, allocate)
        blocks.at_once = job.batch_size or blocks.once(
            "batch size", lambda: opened.streamed.batch_size(seqlen)
        )
        found = _decide_bos(job, opened.streamed, tokenizer, blocks, texts)
        texts = _add_self_written(job, opened, blocks, texts.begin_with(found), tell)
        ruler = _Ruler(job, opened.streamed, texts, seqlen, allocate, tell, watch_eval)
        dense = blocks.once(f"dense {ruler}", ruler.measure)
        tell(_describe_memory(opened.streamed, texts, seqlen))
        tell(_say_what_begins(job, progress, len(blocks)))
        report = walk.prune(
            opened.streamed.model, texts.data, job.recipe,
            watch=meter, report_error=job.report_error, base=base, blocks=blocks,
            held_out=texts.watched, written=texts.written, gram_device=job.gram_device, tell=tell,
        )  # fmt: skip
        report.bos = found
        said = [*prepared.notes, *(found.notes if found else ()), *report.notes]
        report.notes[:] = list(dict.fromkeys(said))
        if owner:
            tell(f"Writing {job.folder}")
            output_folder.write_around(
                files.folder, opened.folder, opened.streamed.model, tokenizer, job.dtype
            )
            files.write_rest()
        distributed.wait()
        pruned = blocks.once(f"pruned {ruler}", lambda: ruler.measure(files.open_written()))
        figures = [] if dense is None or pruned is None else [compare(job.held_out, dense, pruned)]
        record = make_record(
            job, prepared, job.recipe.describe(), report.to_dict(),
            dtype=opened.streamed.dtype, computed=computed, perplexity=figures,
            bits_per_weight=files.bits_per_weight(),
        )  # fmt: skip
        if owner:
            write_record(files.folder, record)
    meter.close()
    distributed.wait()
    return add_output(record, origin, job.folder)


@dataclass(frozen=True)
class _Opened:
    """A model's folder, its files and the model without weights."""

    folder: Path
    shards: Shards
    streamed: StreamedModel


def _stored_dtype(job: Job, origin: hub.Origin, config: Any) -> torch.dtype:
    """The type of the output's weights."""
    if origin.gguf_file:
        return torch.float32 if job.dtype == "auto" else getattr(torch, job.dtype)
    folder = local_folder(origin)
    return stored_dtype(job.dtype, config, open_shards(folder) if folder else None)


def _open(
    job: Job,
    origin: hub.Origin,
    computed: torch.dtype,
    device: torch.device,
    work: Path,
    tell: Tell,
) -> _Opened:
    """The model's safetensors folder; what comes as something else is made one, in memory."""
    folder = local_folder(origin)
    if folder is None:
        folder = work / "dense"
        if distributed.rank() == 0:
            tell(f"Loading {job.model}")
            make_dense_copy(origin, job.dtype, folder)
    shards = open_shards(folder)
    config = hub.load_config(hub.Origin(job.model, str(folder), access=job.access))
    trusted = job.access.trust_remote_code
    streamed = StreamedModel(shards, config, job.dtype, device, trusted, computed)
    if job.device_map is not None:
        streamed.place(choose_devices(streamed, job.device_map))
    return _Opened(folder, shards, streamed)


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
    opened: _Opened,
    base: MaskSet | None,
    work: Path,
    progress: resume.Progress,
    tell: Tell,
) -> OutputFiles | PackedFiles:
    """Plain files; packed ones where values are on a grid."""
    recipe, place = job.recipe, (opened.streamed, opened.shards, job.dtype == "auto")
    files: OutputFiles | PackedFiles
    if recipe.rounding is None and recipe.head_grid is None:
        files = OutputFiles(work / resume.OUTPUT, *place)
    else:
        files = PackedFiles(work / resume.OUTPUT, work / PARTS, *place, recipe.head_grid)
    layout = opened.streamed.layout
    walk.check_pattern(layout, recipe)
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


def _add_self_written(
    job: Job, opened: _Opened, blocks: StreamedBlocks, texts: Texts, tell: Tell
) -> Texts:
    """With the windows that the recipe has the dense model write, which is in memory for that."""
    count, streamed = job.recipe.self_samples, opened.streamed
    if count is None or not isinstance(texts.data, Tensor):
        return texts
    tokens = texts.data

    def write() -> list[list[int]]:
        check_can_write(streamed.model)
        weights = sum(parameter.numel() for parameter in streamed.model.parameters())
        check_room(weights * streamed.compute.itemsize, streamed.device)
        tell(f"The dense model writes {count} windows")
        whole = StreamedModel(
            opened.shards, streamed.model.config, job.dtype, streamed.device,
            job.access.trust_remote_code, streamed.compute,
        )  # fmt: skip
        seed = job.recipe.text_seed
        with forward.ready(whole.load_all()):
            return write_windows(whole.model, tokens, count, seed, texts.bos).tolist()

    return texts.add_written(blocks.once("self-written windows", write))


def _describe_memory(streamed: StreamedModel, texts: Texts, seqlen: int) -> str:
    """What type blocks are computed in, and what they and the hidden states take in it."""
    which = compute.describe(streamed.compute, streamed.dtype, streamed.device)
    said = f"Computing in {which}: {streamed.block_size / 1e6:,.1f} MB for a block"
    samples = sum(len(part) for part in (texts.data, texts.watched) if isinstance(part, Tensor))
    states = streamed.states_size(samples // distributed.size(), seqlen)
    return f"{said}, {states / 1e6:,.1f} MB for the hidden states" if samples else said


def _say_what_begins(job: Job, progress: resume.Progress, blocks: int) -> str:
    if progress.finished:
        return f"Going on after block {progress.finished} of {blocks}: {job.recipe.describe()}"
    return f"Pruning: {job.recipe.describe()}"


@dataclass(frozen=True)
class _Ruler:
    """Measures perplexity before and after, if that is wanted."""

    job: Job
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
        which = "pruned" if pruned else "dense"
        self.tell(f"Perplexity of the {which} model on {self.job.held_out}")
        at_once = streamed_perplexity.windows_at_once(
            self.streamed, self.seqlen, self.job.recipe.nsamples
        )
        return streamed_perplexity.perplexity(
            self.streamed, ids, self.seqlen, self.job.eval_windows, self.tick, pruned,
            at_once, self.allocate, self.texts.bos,
        ).to_dict()  # fmt: skip


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
