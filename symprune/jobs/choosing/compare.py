"""Models and runs side by side: what `symprune compare` calls.

What a record says is taken from it; the rest is measured, one model after the other, on the same
text. A model that does not fit into memory is measured from the disk and continues no prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from symprune import calibration
from symprune.checkpoint.load import load_computing, local_folder
from symprune.checkpoint.packed_shards import PackedShards, open_shards
from symprune.checkpoint.record import versions
from symprune.checkpoint.streamed_model import StreamedModel
from symprune.jobs import samples, sizes
from symprune.jobs.bench import turns
from symprune.jobs.choosing.foresee import forecast_comparison
from symprune.jobs.choosing.overlap import masks_on_disk, overlaps
from symprune.jobs.choosing.sources import Source, read_sources
from symprune.jobs.choosing.speed import add_speed, plan_turns
from symprune.jobs.estimate.forecast import Forecast, attempt
from symprune.jobs.evaluate import evaluate
from symprune.jobs.measures import read_bos
from symprune.jobs.samples import Continuation
from symprune.maskset import FILE_NAME, MaskSet
from symprune.models import hub

Tell = Callable[[str], None]
Tick = Callable[[int, int], None]
KIND = "compare"
ERRORS = ("relative_error", "held_out_error")


@dataclass(frozen=True)
class Comparison:
    """What is compared, and what is measured of it. data is None where no perplexity is wanted."""

    models: Sequence[str]
    prompts: tuple[str, ...] = ()
    data: str | None = "builtin"
    windows: int | None = 8
    seqlen: int = 512
    speed: bool = False
    dtype: str = "auto"
    device: str = "auto"
    access: hub.Access = field(default_factory=hub.Access)


@dataclass
class _Found:
    """What is known of one of them."""

    row: dict[str, Any]
    masks: MaskSet | None = None
    written: list[Continuation] | None = None
    vocabulary: int | None = None
    notes: list[str] = field(default_factory=list)


def compare(
    asked: Comparison,
    tell: Tell = lambda _: None,
    watch: turns.Watch = lambda *_: None,
    tick: Tick = lambda *_: None,
    go_on: Callable[[Forecast | None], bool] | None = None,
) -> dict[str, Any]:
    """The record of a comparison. What can fail cheaply is first. go_on is told what it will take,
    None where that cannot be told, and says whether to go on: if not, nothing is measured."""
    begun = time.perf_counter()
    samples.check_prompts(asked.prompts)
    sources = read_sources(asked.models, asked.dtype, asked.access)
    if asked.data is not None:
        calibration.text(asked.data, "test")
    hub.pick_device(asked.device)
    prompts = _fitting(asked.prompts, sources)
    turns_plan, notes = plan_turns(sources, asked.device) if asked.speed else (None, [])
    if go_on is not None:
        tell("Timing a block of each")
        foreseen = attempt(
            lambda: forecast_comparison(sources, asked, len(prompts), turns_plan, begun)
        )
        if not go_on(foreseen):
            return {}
    found = [_measure(source, asked, prompts, tell, tick) for source in sources]
    table = overlaps([each.masks for each in found])
    notes += [note for each in found for note in each.notes]
    tokenizers = len({each.vocabulary for each in found} - {None})
    if tokenizers > 1:
        notes.append("The models have different tokenizers: perplexities cannot be compared.")
    record = {
        "kind": KIND,
        "models": [each.row for each in found],
        "tokenizers": tokenizers,
        "overlap": [[each and asdict(each) for each in row] for row in table],
        "samples": _put_together(prompts, sources, found),
        "versions": versions(),
        "notes": list(dict.fromkeys(notes)),
    }
    if turns_plan is None:
        return record
    return add_speed(record, sources, turns_plan, asked.dtype, asked.access, tell, watch)


def _fitting(prompts: tuple[str, ...], sources: Sequence[Source]) -> tuple[str, ...]:
    """The prompts that all models have room for."""
    for source in sources:
        if source.origin is not None and prompts:
            tokenizer, config = hub.load_tokenizer(source.origin), hub.load_config(source.origin)
            kept = samples.fitting(prompts, tokenizer, config)
            prompts = prompts if kept == prompts else kept
    return prompts


def _measure(
    source: Source, asked: Comparison, prompts: tuple[str, ...], tell: Tell, tick: Tick
) -> _Found:
    """All that is known of one, and all that is measured."""
    found = _Found(_of_record(source))
    if source.origin is None:
        masks = source.folder / FILE_NAME if source.folder else None
        found.masks = MaskSet.load(masks) if masks and masks.is_file() else None
        return found
    tell(f"Looking at {source.given}")
    tokenizer = hub.load_tokenizer(source.origin)
    found.vocabulary = hash(frozenset(tokenizer.get_vocab().items()))
    folder = local_folder(source.origin)
    found.row["weight_bytes"] = sizes.weight_bytes(source.origin, folder)
    if folder is not None:
        _look_at_files(source, folder, found)
    model = None
    if folder is None and _lacks_room(source, asked) is None:
        tell(f"Loading {source.given}")
        model = _load(source, asked)
    if asked.data is not None:
        tell(f"Perplexity of {source.given} on {asked.data}")
        measured = evaluate(
            source.name, asked.data, asked.seqlen, asked.windows, source.dtype, asked.device,
            tick=tick, access=asked.access, loaded=model,
        )  # fmt: skip
        kept = ("data", "perplexity", "windows", "seqlen")
        found.row["perplexity"] = {name: measured[name] for name in kept}
        found.notes += measured["notes"]
    if prompts or source.is_gguf:
        _look_in_memory(source, asked, prompts, tokenizer, found, tell, model)
    return found


def _look_at_files(source: Source, folder: Path, found: _Found) -> None:
    """Bits and zeros, from a model's safetensors files."""
    shards, config = open_shards(folder), hub.load_config(hub.resolve(str(folder), _trust(source)))
    streamed = StreamedModel(shards, config, "auto", "cpu", _trust(source).trust_remote_code)
    found.row["bits_per_weight"] = sizes.bits_per_weight(streamed, shards)
    if isinstance(shards, PackedShards) or (source.record and (folder / FILE_NAME).is_file()):
        found.masks = MaskSet.load(folder)
    else:
        found.masks = masks_on_disk(streamed)
    found.row["what"] = _say_what(source, isinstance(shards, PackedShards), found.masks.sparsity())
    _count_zeros(found.row, found.masks)


def _trust(source: Source) -> hub.Access:
    """For a folder on this machine: only whether its code may run."""
    trusted = source.origin is not None and source.origin.access.trust_remote_code
    return hub.Access(trust_remote_code=trusted)


def _say_what(source: Source, packed: bool, sparsity: float) -> str:
    if packed:
        return "packed"
    return "pruned" if source.record or sparsity > 0.05 else "dense"


def _count_zeros(row: dict[str, Any], masks: MaskSet) -> None:
    row["sparsity"] = masks.sparsity()
    row["weights"] = sum(masks[name].numel() for name in masks)


def _look_in_memory(
    source: Source,
    asked: Comparison,
    prompts: tuple[str, ...],
    tokenizer: Any,
    found: _Found,
    tell: Tell,
    model: Any,
) -> None:
    """Samples, and the zeros of a GGUF file, which are counted in memory only. model: None if it is
    not there yet."""
    reason = None if model is not None else _lacks_room(source, asked)
    if reason is not None:
        found.notes.append(f"{source.given} continued no prompts: {reason}")
        return
    tell(f"Continuing {len(prompts)} prompts with {source.given}")
    if model is None:
        model = _load(source, asked)
    if source.is_gguf:
        found.row["what"] = "GGUF"
        found.row["bits_per_weight"] = sizes.bits_of_gguf(Path(str(source.origin)))
        _count_zeros(found.row, MaskSet.of(model))
    if not model.can_generate():
        found.notes.append(f"{source.given} continued no prompts: it cannot write text.")
        return
    kept = read_bos(source.folder) if source.folder else None
    bos = kept.token if kept else None
    found.written = samples.continue_prompts(model, tokenizer, prompts, bos)


def _lacks_room(source: Source, asked: Comparison) -> str | None:
    """Why a model is not loaded as a whole; None if it is."""
    assert source.origin is not None
    size = sizes.size_in_memory(hub.load_config(source.origin), source.origin)
    return samples.lacks_room(size, hub.pick_device(asked.device))


def _load(source: Source, asked: Comparison) -> Any:
    assert source.origin is not None
    device = hub.pick_device(asked.device)
    return load_computing(source.origin, source.dtype, device, "auto", dequantize=False)[0]


def _of_record(source: Source) -> dict[str, Any]:
    """What is known of a run without looking at its weights."""
    record = source.record
    row: dict[str, Any] = {"given": source.given, "label": source.label, "what": "record"}
    row["name"] = source.name
    if not record:
        return {**row, "what": "evaluation" if source.origin is None else "dense"} | _scores(source)
    wanted = ("description", "sparsity", "bits_per_weight")
    row |= {name: record[name] for name in wanted if name in record}
    row["recorded"] = [entry for entry in record.get("perplexity") or [] if isinstance(entry, dict)]
    if "pruned_bytes" in record:
        row["weight_bytes"] = record["pruned_bytes"]
    layers = [layer for layer in record.get("layers") or [] if isinstance(layer, dict)]
    row["layers"] = [
        {name: layer.get(name) for name in ("name", "kind", "sparsity", *ERRORS) if name in layer}
        for layer in layers
    ]
    return row | _scores(source)


def _scores(source: Source) -> dict[str, Any]:
    return {"tasks": dict(source.scores)} if source.scores else {}


def _put_together(
    prompts: tuple[str, ...], sources: Sequence[Source], found: Sequence[_Found]
) -> list[dict[str, Any]]:
    written = {
        source.label: each.written
        for source, each in zip(sources, found, strict=True)
        if each.written
    }
    return samples.put_together(prompts, written) if written else []
