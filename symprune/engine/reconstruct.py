"""A block's kept weights, trained to give the dense model's outputs: the walk's part of it.

Beside the hidden states of the pruned model go those of the dense one: what a block makes of them
while it is still dense is what the pruned block is to make of its own inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn

from symprune.engine import decide
from symprune.engine.blocks import PrunedBlock
from symprune.engine.forward import Activations, Tick
from symprune.engine.report import LayerReport, Report
from symprune.errors import SympruneError
from symprune.machine import distributed, host, memory
from symprune.models.layout import device_of
from symprune.models.matrices import Matrix
from symprune.recipe import Recipe
from symprune.reconstruct.fit import BlockReconstruction, Fitted, Problem, fit, importance_of
from symprune.reconstruct.weights import GridWeights, MaskedWeights, Weights
from symprune.values.grid import fetch

COPIES = 5  # of a weight in fp32: itself, its gradient, Adam's two moments, the best so far
ROUNDED = 4  # more of one on a grid: before it was rounded, as it is, its gradient, how far it went
BEFORE, AFTER = "block_error_base", "block_error"


def check_processes(recipe: Recipe) -> None:
    """Fail where several processes would have to agree on every step."""
    if recipe.reconstruction is not None and distributed.size() > 1:
        raise SympruneError(
            "Reconstruction trains in one process: start one, or pass --reconstruct none."
        )


class Reconstruction:
    """The dense model's hidden states, and the fits to them.

    The last `watching` samples are not trained on. Where nobody was to watch, an eighth of the
    samples does.
    """

    def __init__(
        self, dense: Activations, recipe: Recipe, watching: int | None, prefix: str
    ) -> None:
        """prefix: the name of the list that holds the blocks."""
        assert recipe.reconstruction is not None
        self.options: BlockReconstruction = recipe.reconstruction
        self.seed = recipe.seed
        self.copies = COPIES + (ROUNDED if recipe.rounding is not None else 0)
        self.prefix = prefix
        self.dense = dense
        count = len(dense)
        self.watching = watching or max(1, count // 8)
        if count <= self.watching:
            raise SympruneError(
                "Reconstruction needs a sample to train on and another that watches; raise "
                "--nsamples or give a longer text."
            )
        self.inputs: Activations | None = None
        self.importance = torch.empty(0)
        self.unit = 1.0
        self._weighed: list[tuple[Tensor, Tensor]] = []

    @property
    def steps(self) -> int:
        """Windows that a block's training passes at most."""
        return self.options.epochs * (len(self.dense) - self.watching)

    def begin(self) -> None:
        """A block is entered: what it makes of the dense model's states, still dense, is for
        `take`, sample after sample."""
        self.inputs = self.dense.copy() if self.options.inputs == "dense" else None
        self._weighed = []

    def take(self, samples: range, output: Tensor) -> None:
        """The dense block's output for some samples: a target now, and the hidden states."""
        dense = self.dense
        update = output.float() - dense.of(samples).to(output.device).float()
        sizes = torch.linalg.vector_norm(update, dim=-1)
        for each in [sizes] if dense.apart else sizes:
            importance = importance_of(each)
            self._weighed.append((importance, (importance * each.square()).sum()))
        dense.replace(samples, output)

    def _weigh(self) -> None:
        """What tokens count for, from all that was taken."""
        found, units = zip(*self._weighed, strict=True)
        self._weighed = []
        self.importance = torch.stack(found)
        # An error of one unit is that of a block that does nothing. On the way back it is the size
        # of a token's, which is what 16-bit gradients have room for.
        self.unit = max(sum(host.bring(units)) / len(units), torch.finfo(torch.float32).tiny)

    def fit(
        self,
        index: int,
        block: nn.Module,
        found: list[Matrix],
        pruned: PrunedBlock,
        activations: Activations,
        layers: list[LayerReport],
        stored: torch.dtype | None,
        tick: Tick = lambda _: None,
    ) -> Fitted | None:
        """Train the block's kept weights, put the best into it and its values into `pruned`. None
        where everything in it was left as it was."""
        self._weigh()
        prefix = f"{self.prefix}.{index}."
        trained = self._select(found, pruned, layers, stored, prefix)
        if not trained:
            return None
        pruned.unrounded.clear()
        problem = self._problem(index, block, activations)
        count = len(self.dense) - self.watching
        fitted = fit(
            trained, problem, range(count), range(count, len(self.dense)), self.options,
            decide.generator_for(self.seed, f"{prefix} reconstruction"), tick,
        )  # fmt: skip
        parameters = dict(block.named_parameters())
        for name, part in trained.items() if fitted.after < fitted.before else ():
            parameters[name].data.copy_(part.written())
            pruned.values |= fetch(part.values())
        self.inputs = None
        return fitted

    def _problem(self, index: int, block: nn.Module, activations: Activations) -> Problem:
        inputs, dense, device = self.inputs or activations, self.dense, device_of(block)
        fixed = {name: parameter.detach() for name, parameter in block.named_parameters()}

        def run(weights: Mapping[str, Tensor], sample: int) -> Tensor:
            return inputs.run(index, block, range(sample, sample + 1), {**fixed, **weights})

        def target(sample: int) -> Tensor:
            return dense.of(range(sample, sample + 1)).to(device)

        return Problem(run, target, self.importance, self.unit)

    def _select(
        self,
        found: list[Matrix],
        pruned: PrunedBlock,
        layers: list[LayerReport],
        stored: torch.dtype | None,
        prefix: str,
    ) -> dict[str, Weights]:
        """What is trained of a block, by the names it has there: what is not left as it was."""
        left = {layer.name for layer in layers if layer.dense}
        parameters: dict[str, list[Matrix]] = {}
        for matrix in found:
            parameters.setdefault(matrix.parameter_name, []).append(matrix)
        trained: dict[str, Weights] = {}
        for name, matrices in parameters.items():
            if all(matrix.name in left for matrix in matrices):
                continue
            weight, keep = matrices[0].parameter.data, pruned.masks[name]
            values = {m.name: pruned.values[m.name] for m in matrices if m.name in pruned.values}
            inside = name.removeprefix(prefix)
            if values:
                turned, unrounded = matrices[0].transposed, pruned.unrounded
                trained[inside] = GridWeights(weight, keep, values, turned, unrounded)
            else:
                trained[inside] = MaskedWeights(weight, keep, stored or weight.dtype)
        return trained

    def check_memory(self, index: int, block: nn.Module, activations: Activations) -> str:
        """What a block's training takes, as a sentence; an error when it is too much."""
        problem, kept = self._problem(index, block, activations), dict[int, int]()

        def count(tensor: Tensor) -> Tensor:
            """Several steps may keep one tensor."""
            size = tensor.numel() * tensor.element_size()
            kept[tensor.data_ptr()] = max(size, kept.get(tensor.data_ptr(), 0))
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            weights = {name: p.detach().requires_grad_() for name, p in block.named_parameters()}
            output = problem.run(weights, 0)
        back = sum(kept.values()) - sum(kept.get(p.data_ptr(), 0) for p in weights.values())
        del output  # until here nothing that is kept could make room for something else
        weights_size = self.copies * 4 * sum(p.numel() for p in block.parameters())
        states = self.dense.hidden.numel() * self.dense.hidden.element_size()
        states *= 2 if self.options.inputs == "dense" else 1
        needed, free = weights_size + back, memory.free(device_of(block))
        if needed > free:
            raise SympruneError(
                f"Training a block needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
                "pass --reconstruct none, or lower --seqlen."
            )
        return (
            f"Reconstruction: {weights_size / 1e6:,.0f} MB for a block's weights in training, "
            f"{back / 1e6:,.0f} MB for the way back of a window, {states / 1e6:,.0f} MB for the "
            "dense model's hidden states"
        )


def add_figures(report: Report, first: int, fitted: Fitted | None) -> None:
    """The error of a block goes to each of its matrices, from the one numbered `first` on."""
    if fitted is None:
        return
    figures = {BEFORE: fitted.before**0.5, AFTER: fitted.after**0.5}
    for number in range(first, len(report.layers)):
        layer = report.layers[number]
        report.layers[number] = replace(layer, figures={**layer.figures, **figures})


def summary(layers: list[LayerReport]) -> list[str]:
    """A sentence about what the reconstruction brought."""
    blocks = {(f[BEFORE], f[AFTER]) for f in (layer.figures for layer in layers) if BEFORE in f}
    if not blocks:
        return []
    better = sum(after < before for before, after in blocks)
    gain = median(1 - after / before if before > 0 else 0.0 for before, after in blocks)
    return [
        f"Reconstruction lowered the error of {better} of {len(blocks)} blocks on held-out tokens, "
        f"in the median by {100 * gain:.0f} %."
    ]
