"""A block's kept weights, trained to give the dense model's outputs: the walk's part of it.

Beside the hidden states of the pruned model go those of the dense one: what a block makes of them
while it is still dense is what the pruned block is to make of its own inputs. By parts, attention
is trained first, on the states in the middle of the block, and the MLP behind it on the block's
outputs. The last block is then trained on what the head predicts from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn

from symprune.engine import decide
from symprune.engine.blocks import PrunedBlock
from symprune.engine.forward import Activations, Tick
from symprune.engine.middle import Middle, find_middle
from symprune.engine.predictions import Predictions, frozen, size_of_predictions
from symprune.engine.report import LayerReport, Report
from symprune.errors import SympruneError
from symprune.machine import distributed, host, memory
from symprune.models.layout import Layout, device_of
from symprune.models.matrices import Matrix
from symprune.recipe import Recipe
from symprune.reconstruct.fit import (
    BlockReconstruction,
    Fitted,
    Loss,
    Problem,
    Run,
    fit,
    importance_of,
    watch_error,
)
from symprune.reconstruct.weights import GridWeights, MaskedWeights, Weights
from symprune.values.grid import fetch
from symprune.wording import percent_of

COPIES = 5  # of a weight in fp32: itself, its gradient, Adam's two moments, the best so far
ROUNDED = 4  # more of one on a grid: before it was rounded, as it is, its gradient, how far it went
BEFORE, AFTER = "block_error_base", "block_error"
APART, NEARER = "divergence_base", "divergence"


def check_processes(recipe: Recipe) -> None:
    """Fail where several processes would have to agree on every step."""
    alone = recipe.reconstruction is not None and not recipe.trains_apart
    if alone and distributed.size() > 1:
        raise SympruneError(
            "Training behind pruned blocks takes one block after the other, in one process. Start "
            "one, pass --reconstruct none, or have a recipe train in the dense model (inputs: "
            "dense, for the recipe and for reconstruct), where processes take different blocks."
        )


class Aim:
    """Hidden states of the dense model that a fit comes near to, and what tokens count for in it:
    gathered sample after sample, then weighed."""

    def __init__(self, states: Activations) -> None:
        self.states = states
        self._weighed: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        self._weighed = []

    def take(self, samples: range, before: Tensor, states: Tensor) -> None:
        """The states of some samples, from those in front of the block."""
        sizes = torch.linalg.vector_norm(states.float() - before, dim=-1)
        for each in [sizes] if self.states.apart else sizes:
            importance = importance_of(each)
            self._weighed.append((importance, (importance * each.square()).sum()))
        self.states.replace(samples, states)

    def weigh(self) -> tuple[Tensor, float]:
        """What each token's squared error counts for, and the unit of an error: that of a block
        that does nothing. On the way back it is the size of a token's, which is what 16-bit
        gradients have room for."""
        found, units = zip(*self._weighed, strict=True)
        unit = sum(host.bring(units)) / len(units)
        return torch.stack(found), max(unit, torch.finfo(torch.float32).tiny)


class Reconstruction:
    """The dense model's hidden states, and the fits to them.

    The last `watching` samples are not trained on. Where nobody was to watch, an eighth of the
    samples does.
    """

    def __init__(
        self, dense: Activations, recipe: Recipe, watching: int | None, prefix: str, tokens: Tensor
    ) -> None:
        """prefix: the name of the list that holds the blocks. tokens: the samples."""
        assert recipe.reconstruction is not None
        self.options: BlockReconstruction = recipe.reconstruction
        self.seed = recipe.seed
        self.copies = COPIES + (ROUNDED if recipe.rounding is not None else 0)
        self.prefix = prefix
        self.dense, self.tokens = dense, tokens
        count = len(dense)
        self.watching = watching or max(1, count // 8)
        if count <= self.watching:
            raise SympruneError(
                "Reconstruction needs a sample to train on and another that watches; raise "
                "--nsamples or give a longer text."
            )
        self.inputs: Activations | None = None
        self.outputs = Aim(dense)
        self.halfway = Aim(dense.copy()) if self.options.by_parts else None
        self.middle: Middle | None = None
        self._seen: Tensor | None = None

    @property
    def steps(self) -> int:
        """Windows that a block's training passes at most."""
        return self.options.epochs * (len(self.dense) - self.watching)

    @contextmanager
    def entered(self, index: int, block: nn.Module, found: list[Matrix]) -> Iterator[None]:
        """A block is there as long as this lasts: what it makes of the dense model's states, still
        dense, is for `take`, sample after sample."""
        self.inputs = self.dense.copy() if self.options.inputs == "dense" else None
        self.outputs.begin()
        self.middle = None
        if self.halfway is not None:
            self.halfway.begin()
            self.middle = find_middle(self.dense, index, block, found, self._start_of(index))
        with nullcontext() if self.middle is None else self.middle.watch(self._see):
            yield
        self._seen = self.inputs = None

    def _see(self, states: Tensor) -> None:
        self._seen = states.detach()

    def _start_of(self, index: int) -> str:
        """What the names of a block's parameters begin with."""
        return f"{self.prefix}.{index}."

    def take(self, samples: range, output: Tensor) -> None:
        """The dense block's output for some samples: a target now, and the hidden states."""
        before = self.dense.of(samples).to(output.device).float()
        if self.halfway is not None and self.middle is not None:
            assert self._seen is not None
            self.halfway.take(samples, before, self._seen)
        self.outputs.take(samples, before, output)

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
        trained = self._select(found, pruned, layers, stored, self._start_of(index))
        if not trained:
            return None
        pruned.unrounded.clear()
        inputs, middle = self.inputs or activations, self.middle
        whole = self._problem(index, block, inputs, self.outputs)
        if middle is None or self.halfway is None:
            return self._fit(index, block, pruned, trained, whole, "", tick)
        watching = range(len(self.dense) - self.watching, len(self.dense))
        before, epochs = watch_error(whole, watching), 0
        part = self._problem(index, block, inputs, self.halfway, middle)
        for first, problem in ((True, part), (False, whole)):
            some = {name: own for name, own in trained.items() if middle.holds(name) is first}
            if some:
                name = "first half" if first else "second half"
                epochs = self._fit(index, block, pruned, some, problem, name, tick).epochs
        return Fitted(before, watch_error(whole, watching), epochs)

    def fit_predictions(
        self,
        layout: Layout,
        index: int,
        block: nn.Module,
        found: list[Matrix],
        pruned: PrunedBlock,
        activations: Activations,
        layers: list[LayerReport],
        stored: torch.dtype | None,
        tick: Tick = lambda _: None,
    ) -> Fitted | None:
        """Train the last block, whose outputs were trained on already, on what the head, which is
        there, predicts from them. activations: of the pruned model."""
        trained = self._select(found, pruned, layers, stored, self._start_of(index))
        head = layout.model.get_output_embeddings()  # type: ignore[operator]
        if not trained or head is None:
            return None
        run = self._runner(index, block, activations)
        problem = Predictions(layout, self.tokens, run, self.dense, len(head.weight))
        options = self.options.for_predictions()
        with frozen(layout.model):
            return self._fit(index, block, pruned, trained, problem, "predictions", tick, options)

    def watch_outputs(self, index: int, block: nn.Module, activations: Activations) -> float:
        """The error of the block's outputs as it is now, where nobody trained on."""
        problem = self._problem(index, block, self.inputs or activations, self.outputs)
        return watch_error(problem, range(len(self.dense) - self.watching, len(self.dense)))

    def _fit(
        self,
        index: int,
        block: nn.Module,
        pruned: PrunedBlock,
        trained: dict[str, Weights],
        problem: Loss,
        name: str,
        tick: Tick,
        options: BlockReconstruction | None = None,
    ) -> Fitted:
        """Train some of the weights; what is better than before goes into the block."""
        count = len(self.dense) - self.watching
        drawn = f"{self._start_of(index)} reconstruction" + (f" {name}" if name else "")
        fitted = fit(
            trained, problem, range(count), range(count, len(self.dense)), options or self.options,
            decide.generator_for(self.seed, drawn), tick,
        )  # fmt: skip
        parameters = dict(block.named_parameters())
        for own, part in trained.items() if fitted.after < fitted.before else ():
            parameters[own].data.copy_(part.written())
            pruned.values |= fetch(part.values())
        return fitted

    def _problem(
        self,
        index: int,
        block: nn.Module,
        activations: Activations,
        aim: Aim,
        middle: Middle | None = None,
    ) -> Problem:
        """The block up to its middle, if one is given, or all of it."""
        whole, device = self._runner(index, block, activations), device_of(block)

        def run(weights: Mapping[str, Tensor], sample: int) -> Tensor:
            if middle is None:
                return whole(weights, sample)
            return middle.reach(lambda: whole(weights, sample))

        def target(sample: int) -> Tensor:
            return aim.states.of(range(sample, sample + 1)).to(device)

        return Problem(run, target, *aim.weigh())

    def _runner(self, index: int, block: nn.Module, activations: Activations) -> Run:
        """run(weights, sample): the block's output with some weights in the place of its own."""
        fixed = {name: parameter.detach() for name, parameter in block.named_parameters()}

        def run(weights: Mapping[str, Tensor], sample: int) -> Tensor:
            return activations.run(index, block, range(sample, sample + 1), {**fixed, **weights})

        return run

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

    def check_memory(
        self, index: int, block: nn.Module, activations: Activations, words: int
    ) -> str:
        """What a block's training takes, as a sentence; an error when it is too much. words: of the
        vocabulary, where the last block is trained to predict."""
        run, kept = self._runner(index, block, self.inputs or activations), dict[int, int]()

        def count(tensor: Tensor) -> Tensor:
            """Several steps may keep one tensor."""
            size = tensor.numel() * tensor.element_size()
            kept[tensor.data_ptr()] = max(size, kept.get(tensor.data_ptr(), 0))
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            weights = {name: p.detach().requires_grad_() for name, p in block.named_parameters()}
            output = run(weights, 0)
        back = sum(kept.values()) - sum(kept.get(p.data_ptr(), 0) for p in weights.values())
        del output  # until here nothing that is kept could make room for something else
        weights_size = self.copies * 4 * sum(p.numel() for p in block.parameters())
        states = self.dense.hidden.numel() * self.dense.hidden.element_size()
        states *= 1 + (self.options.inputs == "dense") + (self.halfway is not None)
        learnt = size_of_predictions(self.tokens.shape[1], words) if words else 0
        needed, free = weights_size + back + learnt, memory.free(device_of(block))
        if needed > free:
            raise SympruneError(
                f"Training a block needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
                "pass --reconstruct none, or lower --seqlen."
            )
        return (
            f"Reconstruction: {weights_size / 1e6:,.0f} MB for a block's weights in training, "
            f"{back / 1e6:,.0f} MB for the way back of a window, {states / 1e6:,.0f} MB for the "
            "dense model's hidden states"
            + (f", {learnt / 1e6:,.0f} MB for predictions at the end" if words else "")
        )


def add_figures(report: Report, first: int, fitted: Fitted | None) -> None:
    """The error of a block goes to each of its matrices, from the one numbered `first` on."""
    if fitted is not None:
        _add(report, first, {BEFORE: fitted.before**0.5, AFTER: fitted.after**0.5})


def add_divergence(report: Report, first: int, fitted: Fitted | None) -> None:
    """The last block's: how far its predictions are from the dense model's, in nats a token."""
    if fitted is not None:
        _add(report, first, {APART: fitted.before, NEARER: fitted.after})


def _add(report: Report, first: int, figures: dict[str, float]) -> None:
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
    which = "no block" if not better else f"{better} of {len(blocks)} blocks"
    typical = f", in the median by {percent_of(gain)}" if gain > 0 else ""
    said = [f"Reconstruction lowered the error of {which} on held-out tokens{typical}."]
    ends = [f for f in (layer.figures for layer in layers) if APART in f]
    if ends and ends[-1][NEARER] < ends[-1][APART]:
        said.append(
            "Trained on the dense model's predictions, the last block brought held-out ones from "
            f"{ends[-1][APART]:.3g} to {ends[-1][NEARER]:.3g} nats a token."
        )
    return said
