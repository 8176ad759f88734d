"""Kept weights trained, with the masks fixed, until a block's outputs are the dense model's again.

Block after block, Adam descends the squared error of the outputs. A token's error is divided by
1 + its update's size / (4 x the median one), so that the few huge tokens do not rule. After every
epoch windows that are not trained on say how good the weights are; the best are kept, if they are
better than what the fit began with. (BR, "Rethinking Pruning Large Language Models", EMNLP 2024;
"A Free Lunch in LLM Compression", arXiv 2510.14444.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from symprune.machine import host
from symprune.reconstruct.weights import Weights, keep_state, restore_state
from symprune.validation import check_choice, check_not_negative, check_positive

Run = Callable[[Mapping[str, Tensor], int], Tensor]
INPUTS = ("pruned", "dense")
LAST = ("predictions", "outputs")
USUAL = 4  # median updates at which a token's error counts half
BETAS = (0.9, 0.95)
PATIENCE = 0.75  # of all epochs, in a row, that bring nothing: the last, slow ones bring most


@dataclass(frozen=True)
class BlockReconstruction:
    """Kept weights of a block trained on the dense model's outputs.

    epochs: passes over the calibration windows, at most. rate: of Adam at the start, relative to
    the size of a kept weight; it falls to zero along a cosine. scale_rate: the same for the scales
    of values on a grid. batch: windows to a step. inputs: of the block, from the `pruned` blocks
    before it or from the `dense` ones; the targets are the dense model's either way. last: what the
    last block is trained on after its outputs: the `predictions` the head makes of them, at
    `last_rate` instead of `rate` and with `last_batch` windows to a step, or nothing else
    (`outputs`).
    """

    name: ClassVar[str] = "block"
    by_parts: ClassVar[bool] = False
    epochs: int = 4
    rate: float = 0.01
    scale_rate: float = 0.005
    batch: int = 1
    inputs: str = "pruned"
    last: str = "predictions"
    last_rate: float = 0.002
    last_batch: int = 4

    def __post_init__(self) -> None:
        check_positive(epochs=self.epochs, rate=self.rate, batch=self.batch)
        check_positive(last_rate=self.last_rate, last_batch=self.last_batch)
        check_not_negative(scale_rate=self.scale_rate)
        check_choice("inputs", self.inputs, INPUTS)
        check_choice("last", self.last, LAST)

    def for_predictions(self) -> BlockReconstruction:
        """The same for the last block's predictions; scales slow down as weights do."""
        slower = self.scale_rate * self.last_rate / self.rate
        return replace(self, rate=self.last_rate, scale_rate=slower, batch=self.last_batch)


@dataclass(frozen=True)
class PartReconstruction(BlockReconstruction):
    """The same part by part: attention on the hidden states behind it, then the MLP on the block's
    outputs. A block whose parts stand side by side is trained as a whole."""

    name: ClassVar[str] = "part"
    by_parts: ClassVar[bool] = True


class Loss(Protocol):
    """What a fit makes small. scale: what it is multiplied by on the way back, where 16-bit
    gradients have room for no smaller numbers; Adam's steps do not depend on it."""

    @property
    def scale(self) -> float: ...

    def loss(self, weights: Mapping[str, Tensor], sample: int) -> Tensor:
        """The error of one sample with these weights."""


@dataclass(frozen=True)
class Problem:
    """A block to fit: run(weights, sample) is its output with these weights (by name) in the place
    of its own, target(sample) what it should be. importance, `[samples, ...]`, is what a token's
    squared error counts for, unit what a squared error is measured in."""

    scale: ClassVar[float] = 1.0
    run: Run
    target: Callable[[int], Tensor]
    importance: Tensor
    unit: float

    def loss(self, weights: Mapping[str, Tensor], sample: int) -> Tensor:
        """The squared error of one sample."""
        output = self.run(weights, sample)
        error = (output.float() - self.target(sample).float()).square().sum(-1)
        return (error * self.importance[sample]).sum() / self.unit


@dataclass(frozen=True)
class Fitted:
    """The error on the windows that watched, before and after, and the epochs it took."""

    before: float
    after: float
    epochs: int


def importance_of(sizes: Tensor) -> Tensor:
    """What each token's squared error counts for, from the sizes of its sample's updates."""
    usual = sizes.flatten().median().clamp(min=torch.finfo(sizes.dtype).tiny)
    return (1 + sizes / (USUAL * usual)) ** -2


@torch.enable_grad()
def fit(
    trained: Mapping[str, Weights],
    problem: Loss,
    fitting: Sequence[int],
    watching: Sequence[int],
    options: BlockReconstruction,
    generator: torch.Generator,
    tick: Callable[[int], None] = lambda _: None,
) -> Fitted:
    """Train on the samples `fitting`, in an order the generator draws; `watching` decide. What is
    trained holds the best weights afterwards, those it came with if none were better."""
    parts = list(trained.values())
    adam = torch.optim.Adam(
        [group for part in parts for group in part.groups(options.rate, options.scale_rate)],
        betas=BETAS,
    )
    first = [group["lr"] for group in adam.param_groups]
    steps, done = options.epochs * -(-len(fitting) // options.batch), 0
    before = least = _watch(trained, problem, watching)
    best, best_epoch, epoch = keep_state(parts), 0, 0
    for epoch in range(1, options.epochs + 1):
        order = torch.randperm(len(fitting), generator=generator).tolist()
        for start in range(0, len(order), options.batch):
            some = [fitting[number] for number in order[start : start + options.batch]]
            _descend(trained, problem, some, adam)
            done += 1
            share = (1 + math.cos(math.pi * done / steps)) / 2
            for group, rate in zip(adam.param_groups, first, strict=True):
                group["lr"] = rate * share
            tick((epoch - 1) * len(order) + start)
        error = _watch(trained, problem, watching)
        if error < least:
            least, best, best_epoch = error, keep_state(parts), epoch
        if epoch - best_epoch >= max(2, PATIENCE * options.epochs):
            break
    restore_state(parts, best)
    return Fitted(before, least, epoch)


def _descend(
    trained: Mapping[str, Weights], problem: Loss, samples: list[int], adam: torch.optim.Adam
) -> None:
    """One step of Adam on the error of some samples, one after the other."""
    adam.zero_grad()
    for sample in samples:
        loss = problem.loss({name: part.made() for name, part in trained.items()}, sample)
        (problem.scale * loss).backward()
    for part in trained.values():
        part.mask_gradient()
    adam.step()


def _watch(trained: Mapping[str, Weights], problem: Loss, samples: Sequence[int]) -> float:
    """The mean error of samples with the weights as they would be written."""
    weights = {name: part.written() for name, part in trained.items()}
    return watch_error(problem, samples, weights)


@torch.no_grad()
def watch_error(
    problem: Loss, samples: Sequence[int], weights: Mapping[str, Tensor] | None = None
) -> float:
    """The mean error of samples, with the block's own weights or others."""
    errors = host.bring([problem.loss(weights or {}, sample) for sample in samples])
    return math.fsum(errors) / len(errors)
