"""The walk over a model: block by block, collect -> score -> mask -> apply -> pass on (thesis
6.3-6.4).

A block is entered once. Its statistics are collected while it is still dense, on inputs that come
from the already pruned blocks before it; then it is pruned and run again for the next block's
inputs. Memory beyond the model is one block's temporaries and one copy of the hidden states.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from symprune import decide, distributed, masks, memory, walk
from symprune.blocks import Blocks
from symprune.calibration import calibration_tokens
from symprune.errors import SympruneError
from symprune.hub import max_length
from symprune.maskset import MaskSet
from symprune.models import Layout, Matrix, find_layout
from symprune.recipe import Recipe
from symprune.stats import ChannelStats

Watch = Callable[[str, int, int, int, int, str], None]
"""watch(stage, block, blocks, done, total, layer): called as the work goes on. What is done are
samples, or, in the stage `mask`, matrices: then `layer` is the name of the next."""


@dataclass(frozen=True)
class LayerReport:
    """What happened to one matrix."""

    name: str
    kind: str
    part: str
    rows: int
    columns: int
    removed: int
    tokens: int
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def sparsity(self) -> float:
        return self.removed / self.size

    def to_dict(self) -> dict[str, Any]:
        plain = {name: value for name, value in asdict(self).items() if name != "figures"}
        return {**plain, "sparsity": self.sparsity, **self.figures}


@dataclass
class Report:
    """What a run did: per layer, in total, and the masks."""

    recipe: Recipe
    seqlen: int
    layers: list[LayerReport] = field(default_factory=list)
    masks: MaskSet = field(default_factory=MaskSet)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: int = 0
    parameters: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def prunable(self) -> int:
        return sum(layer.size for layer in self.layers)

    @property
    def removed(self) -> int:
        return sum(layer.removed for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """Fraction of the prunable weights that went."""
        return self.removed / self.prunable if self.prunable else 0.0

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """kind -> (removed, size)"""
        totals: dict[str, tuple[int, int]] = {}
        for layer in self.layers:
            removed, size = totals.get(layer.kind, (0, 0))
            totals[layer.kind] = (removed + layer.removed, size + layer.size)
        return totals

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.to_dict(),
            "seqlen": self.seqlen,
            "sparsity": self.sparsity,
            "prunable": self.prunable,
            "removed": self.removed,
            "parameters": self.parameters,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory,
            "notes": self.notes,
            "layers": [layer.to_dict() for layer in self.layers],
        }


def prune(
    model: nn.Module,
    data: Any,
    recipe: Recipe | None = None,
    watch: Watch = lambda *_: None,
    report_error: bool = False,
    base: MaskSet | None = None,
    embedded: walk.Activations | None = None,
    blocks: Blocks | None = None,
) -> Report:
    """Prune `model` in place and say what was done.

    data is a tokenizer, and the recipe says which text to calibrate on, or the calibration tokens
    themselves, `[samples, length]`. report_error also measures every layer's reconstruction error.
    base are masks made earlier, to be refined instead of made. embedded is what `walk.embed` made
    of the same tokens, for callers that prune again and again. blocks says where the blocks are, if
    not in memory. In a torch.distributed process group the samples are divided among the processes.
    """
    recipe = recipe or Recipe()
    needs = decide.needs(recipe, report_error)
    layout = find_layout(model)
    check_pattern(layout, recipe)
    tokens, notes = _tokens(model, data, recipe, needs)
    report = Report(recipe, tokens.shape[1], notes=notes)
    report.parameters = sum(parameter.numel() for parameter in model.parameters())
    with walk.ready(model):
        blocks = blocks or Blocks(layout, embedded)
        _walk(layout, blocks, tokens, report, needs, watch, base, report_error)
    report.peak_memory = memory.peak()
    return report


def _tokens(
    model: nn.Module, data: Any, recipe: Recipe, needs: decide.Needs
) -> tuple[Tensor, list[str]]:
    if isinstance(data, Tensor):
        if data.dim() != 2 or data.numel() == 0:
            raise SympruneError("Calibration tokens must be a filled [samples, length] tensor.")
        return data, []
    if not needs:
        return torch.zeros((0, recipe.seqlen), dtype=torch.long), []
    seqlen, notes = cap_seqlen(model.config, recipe.seqlen)
    return (
        calibration_tokens(recipe.calibration, data, recipe.nsamples, seqlen, recipe.text_seed),
        notes,
    )


def cap_seqlen(config: Any, seqlen: int) -> tuple[int, list[str]]:
    """The sequence length the model can take, and a note when that is less than was asked for."""
    limit = max_length(config)
    if limit is None or seqlen <= limit:
        return seqlen, []
    return limit, [f"The model supports {limit} positions: seqlen is {limit}, not {seqlen}."]


def check_pattern(layout: Layout, recipe: Recipe) -> None:
    """Fail before any work when an N:M pattern does not fit a layer."""
    if recipe.n_of_m is None:
        return
    for matrix in layout.all_matrices():
        if matrix.weight.shape[1] % recipe.n_of_m.m:
            raise SympruneError(
                f"Pattern {recipe.pattern} does not divide the {matrix.weight.shape[1]} input "
                f"channels of {matrix.name}."
            )


def _walk(
    layout: Layout,
    blocks: Blocks,
    tokens: Tensor,
    report: Report,
    needs: decide.Needs,
    watch: Watch,
    base: MaskSet | None,
    report_error: bool,
) -> None:
    tokens = distributed.share(tokens)
    count, samples = len(blocks), len(tokens)

    def ticker(stage: str, index: int) -> walk.Tick:
        return lambda done: watch(stage, index, count, done, samples, "")

    with _timed(report, "embed"):
        first, activations = blocks.begin(tokens if needs else None, report, ticker("embed", 0))
    for index in range(first, count):
        with blocks.block(index) as block:
            found = layout.matrices(index)
            measured = walk.Collector([], [], [])
            if activations is not None:
                with _timed(report, "collect"):
                    measured = walk.collect(
                        activations,
                        index,
                        block,
                        found,
                        needs.inputs,
                        needs.outputs,
                        ticker("collect", index),
                    )
                    distributed.reduce(measured)
            with _timed(report, "mask"):
                kept = _prune_block(
                    found,
                    measured,
                    report,
                    needs,
                    base,
                    report_error,
                    lambda n, i=index, f=found: watch("mask", i, count, n, len(f), f[n].name),  # type: ignore[misc]
                )
            if activations is not None and index + 1 < count:
                with _timed(report, "advance"):
                    activations.advance(index, block, ticker("advance", index))
            with _timed(report, "keep"):
                blocks.finish(index, report, kept, activations)
        watch("done", index, count, samples, samples, "")


def _prune_block(
    found: list[Matrix],
    measured: walk.Collector,
    report: Report,
    needs: decide.Needs,
    base: MaskSet | None,
    report_error: bool,
    tick: walk.Tick,
) -> MaskSet:
    """Make and apply the masks of a block; experts share the mask of their fused parameter."""
    kept, fused = MaskSet(), dict[str, Tensor]()
    for number, matrix in enumerate(found):
        tick(number)
        inputs, outputs = measured.inputs.get(matrix.name), measured.outputs.get(matrix.name)
        if needs and not (inputs or outputs):
            report.notes.append(f"{matrix.name} saw no calibration tokens: its weights decide.")
        decision = decide.decide(
            matrix.name,
            matrix.part,
            matrix.weight,
            inputs,
            outputs,
            report.recipe,
            report_error,
            base=None if base is None else matrix.slice_of(base[matrix.parameter_name]),
        )
        keep = decision.keep
        if decision.weight is not None:
            matrix.weight.copy_(decision.weight)
        matrix.apply(keep)
        stored = keep.T if matrix.transposed else keep
        if matrix.expert is None:
            kept[matrix.parameter_name] = stored
        else:
            whole = fused.setdefault(
                matrix.parameter_name, torch.ones(matrix.parameter.shape, dtype=torch.bool)
            )
            whole[matrix.expert] = stored
        removed = keep.numel() - int(masks.count_true(keep.flatten()))
        tokens = (inputs or outputs or ChannelStats(0)).tokens
        rows, columns = matrix.weight.shape
        names = (matrix.name, matrix.kind, matrix.part)
        report.layers.append(LayerReport(*names, rows, columns, removed, tokens, decision.figures))
    for name, keep in fused.items():
        kept[name] = keep
    return kept


@contextmanager
def _timed(report: Report, stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    report.seconds[stage] = report.seconds.get(stage, 0.0) + time.perf_counter() - start
