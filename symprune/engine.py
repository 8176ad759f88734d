"""The walk over a model: block by block, collect -> score -> mask -> apply -> pass on (thesis
6.3-6.4).

A block is entered once. Its statistics are collected while it is still dense, on inputs that come
from the already pruned blocks before it; then it is pruned and run again for the next block's
inputs. Memory beyond the model is one block's temporaries and one copy of the hidden states.
"""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from symprune import masks, walk
from symprune.calibration import calibration_tokens
from symprune.errors import SympruneError
from symprune.hub import max_length
from symprune.maskset import MaskSet
from symprune.models import Layout, Matrix, find_layout
from symprune.recipe import Recipe
from symprune.stats import SQUARE, ChannelStats

Watch = Callable[[str, int, int, int, int], None]
"""watch(stage, block, blocks, samples done, samples): called as the work goes on."""


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

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def sparsity(self) -> float:
        return self.removed / self.size


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
            "layers": [{**asdict(layer), "sparsity": layer.sparsity} for layer in self.layers],
        }


def prune(
    model: nn.Module,
    data: Any,
    recipe: Recipe | None = None,
    watch: Watch = lambda *_: None,
) -> Report:
    """Prune `model` in place and say what was done.

    data is a tokenizer, and the recipe says which text to calibrate on, or the calibration tokens
    themselves, `[samples, length]`.
    """
    recipe = recipe or Recipe()
    layout = find_layout(model)
    check_pattern(layout, recipe)
    tokens, notes = _tokens(model, data, recipe)
    report = Report(recipe, tokens.shape[1], notes=notes)
    report.parameters = sum(parameter.numel() for parameter in model.parameters())
    with walk.ready(model):
        _walk(layout, tokens, report, watch)
    report.peak_memory = peak_memory()
    return report


def _tokens(model: nn.Module, data: Any, recipe: Recipe) -> tuple[Tensor, list[str]]:
    if isinstance(data, Tensor):
        if data.dim() != 2 or data.numel() == 0:
            raise SympruneError("Calibration tokens must be a filled [samples, length] tensor.")
        return data, []
    if not recipe.criterion.needs:
        return torch.zeros((0, recipe.seqlen), dtype=torch.long), []
    seqlen, notes = cap_seqlen(model.config, recipe.seqlen)
    return (
        calibration_tokens(recipe.calibration, data, recipe.nsamples, seqlen, recipe.seed),
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


def _walk(layout: Layout, tokens: Tensor, report: Report, watch: Watch) -> None:
    blocks, samples = len(layout.blocks), len(tokens)
    needs = report.recipe.criterion.needs
    collect_in = [SQUARE] if "input_norm" in needs else []
    collect_out = [SQUARE] if "output_norm" in needs else []
    activations: walk.Activations | None = None
    if collect_in or collect_out:
        with _timed(report, "embed"):
            activations = walk.embed(
                layout, tokens, lambda n: watch("embed", 0, blocks, n, samples)
            )
    for index, block in enumerate(layout.blocks):
        found = layout.matrices(index)
        measured = walk.Collector([], [], [])
        if activations is not None:
            with _timed(report, "collect"):
                measured = walk.collect(
                    activations,
                    index,
                    block,
                    found,
                    collect_in,
                    collect_out,
                    lambda n, i=index: watch("collect", i, blocks, n, samples),  # type: ignore[misc]
                )
        with _timed(report, "mask"):
            watch("mask", index, blocks, 0, samples)
            _prune_block(found, measured, report)
        if activations is not None and index + 1 < blocks:
            with _timed(report, "advance"):
                activations.advance(
                    index,
                    block,
                    lambda n, i=index: watch("advance", i, blocks, n, samples),  # type: ignore[misc]
                )
        watch("done", index, blocks, samples, samples)


def _prune_block(found: list[Matrix], measured: walk.Collector, report: Report) -> None:
    """Make and apply the masks of a block; experts share the mask of their fused parameter."""
    fused: dict[str, Tensor] = {}
    for matrix in found:
        inputs, outputs = measured.inputs.get(matrix.name), measured.outputs.get(matrix.name)
        keep = _keep(matrix, inputs, outputs, report)
        matrix.apply(keep)
        stored = keep.T if matrix.transposed else keep
        if matrix.expert is None:
            report.masks[matrix.parameter_name] = stored
        else:
            whole = fused.setdefault(
                matrix.parameter_name, torch.ones(matrix.parameter.shape, dtype=torch.bool)
            )
            whole[matrix.expert] = stored
        rows, columns = matrix.weight.shape
        kept = int(masks.count_true(keep.flatten()))
        tokens = (inputs or outputs or ChannelStats(0)).tokens
        report.layers.append(
            LayerReport(
                matrix.name, matrix.kind, matrix.part, rows, columns, keep.numel() - kept, tokens
            )
        )
    for name, keep in fused.items():
        report.masks[name] = keep


def _keep(
    matrix: Matrix, inputs: ChannelStats | None, outputs: ChannelStats | None, report: Report
) -> Tensor:
    recipe, weight = report.recipe, matrix.weight
    if not torch.isfinite(weight).all():
        raise SympruneError(f"{matrix.name} has NaN or infinite weights.")
    for stats in (inputs, outputs):
        if stats is not None and not stats.is_finite():
            raise SympruneError(f"{matrix.name} sees NaN or infinite activations.")
    rows, columns = weight.shape
    ones = torch.ones(1, device=weight.device)
    statistics = {
        # An expert that no calibration token was routed to is scored by its weights alone.
        "input_norm": inputs.norm if inputs else ones.expand(columns),
        "output_norm": outputs.norm if outputs else ones.expand(rows),
        "generator": generator_for(recipe.seed, matrix.name),
    }
    if recipe.criterion.needs and matrix.expert is not None and not (inputs or outputs):
        report.notes.append(
            f"{matrix.name} saw no calibration tokens: scored by its weights alone."
        )
    score = recipe.criterion(weight, statistics, recipe.params)
    return masks.keep_mask(score, recipe.target_sparsity, recipe.group, recipe.n_of_m)


def generator_for(seed: int, name: str) -> torch.Generator:
    """A generator of its own for each matrix, so that no draw depends on the order of the work."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@contextmanager
def _timed(report: Report, stage: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    report.seconds[stage] = report.seconds.get(stage, 0.0) + time.perf_counter() - start


def peak_memory() -> int:
    """The most memory the process has held, in bytes: of the accelerator if one is in use."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
