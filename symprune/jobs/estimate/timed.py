"""The first block, timed: a window or two through it, and the decisions about a few of its rows.

What is decided about a matrix costs so much for the matrix, for its Gram matrix above all, and so
much for each row: two numbers of rows tell both. Nothing is changed by it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from symprune.engine import decide, forward
from symprune.engine.collect import Collector, collect, look
from symprune.engine.forward import Activations
from symprune.engine.text.self_written import AT_ONCE
from symprune.engine.visit.groups import order_kinds
from symprune.jobs.estimate.forecast import where_and_why
from symprune.jobs.estimate.work import Pace
from symprune.machine import compute, distributed
from symprune.models.layout import Layout, device_of, find_layout
from symprune.models.matrices import Matrix
from symprune.models.support import check_supported
from symprune.recipe import Recipe
from symprune.stats import GRAM, ChannelStats
from symprune.token_loss import check_vocabulary, loss

Clock = Callable[[], float]
WINDOWS = 2
FEW, MORE = 48, 144  # rows


class Place(Protocol):
    """Where a model is: on disk, as a `StreamedModel`, or in memory."""

    layout: Layout
    model: Any
    dtype: torch.dtype

    @property
    def at(self) -> torch.device: ...
    def around(self, head: bool = False) -> AbstractContextManager[None]: ...
    def block(self, index: int) -> AbstractContextManager[nn.Module]: ...


class InMemory:
    """A model that is loaded as a whole."""

    def __init__(self, model: Any, stored: torch.dtype | None = None) -> None:
        self.model, self.layout = model, find_layout(model)
        self.dtype, self.at = stored or model.dtype, device_of(model)

    def around(self, head: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def block(self, index: int) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.layout.blocks[index])


@dataclass(frozen=True)
class Timed:
    """The pace of a model; the widths of a block's distinct inputs, how many groups it is measured
    in, and what the way back of a window keeps."""

    pace: Pace
    widths: tuple[int, ...] = ()
    groups: int = 1
    way_back: int = 0


def time_block(
    place: Place,
    tokens: Tensor | None,
    recipe: Recipe,
    report_error: bool = False,
    clock: Clock = time.perf_counter,
    head: bool = True,
) -> Timed:
    """How long the steps of a run take. tokens: windows of the length that is used; without any,
    nothing but the decisions is timed. head: whether the model's head is needed at all."""
    check_supported(getattr(place.model, "config", None))
    stopwatch = _Stopwatch(clock, place.at)
    with distributed.alone(), forward.ready(place.model):
        activations, single, first = None, list[Activations](), Pace()
        if tokens is not None:
            activations, single, first = _time_around(place, tokens[:WINDOWS], head, stopwatch)
        begun = stopwatch.now()
        with place.block(0) as block:
            pace = replace(first, load=stopwatch.now() - begun)
            if single:
                one, many = (_time_pass(each, block, stopwatch) for each in single)
                pace = replace(pace, token=one, tokens=many)
            return _time_inside(place, block, activations, recipe, report_error, pace, stopwatch)


class _Stopwatch:
    """Looks at the clock when the device has done its work."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self.clock, self.device = clock, device

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def of(self, work: Callable[[], Any]) -> float:
        begun = self.now()
        work()
        return self.now() - begun


def _time_around(
    place: Place, tokens: Tensor, head: bool, stopwatch: _Stopwatch
) -> tuple[Activations, list[Activations], Pace]:
    """Embedding and head, the second window of each; the hidden states of the windows, and of one
    token and of several, each by itself."""
    begun = stopwatch.now()
    with place.around(head=head):
        around = stopwatch.now() - begun
        check_vocabulary(tokens, place.model.get_input_embeddings().weight)
        activations = forward.embed(place.layout, tokens)
        embed = stopwatch.of(lambda: forward.embed(place.layout, tokens)) / len(tokens)

        def predict() -> None:
            found = forward.logits(place.layout, tokens[:1], activations, 0)
            loss(found, tokens[0], slice(1, None))

        spent = 0.0
        if head:
            predict()
            spent = stopwatch.of(predict)
        tokens = tokens.flatten()[:AT_ONCE, None]
        single = [
            forward.embed(place.layout, some, at_once=len(some)) for some in (tokens[:1], tokens)
        ]
    return activations, single, Pace(embed=embed, head=spent, around=around)


def _time_inside(
    place: Place,
    block: nn.Module,
    activations: Activations | None,
    recipe: Recipe,
    report_error: bool,
    pace: Pace,
    stopwatch: _Stopwatch,
) -> Timed:
    """The block is entered."""
    layout, needs = place.layout, decide.needs(recipe, report_error)
    found, measured, groups, way_back = layout.matrices(0), Collector(), 1, 0
    pace = replace(pace, write=_time_write(block, place.dtype, stopwatch))
    if activations is None:
        pace = replace(pace, decide=_time_decisions(found, measured, recipe, False, stopwatch))
        return Timed(pace)
    states, one = activations, range(1)
    states.run(0, block, one)
    pace = replace(pace, forward=stopwatch.of(lambda: states.run(0, block, one)))
    seen = look(states, 0, block, found)
    widths = {id(stats): stats.channels for stats in seen.inputs.values()}
    if recipe.by_groups:
        groups = max(1, len(set(order_kinds(found, seen.inputs).values())))
    if needs:
        collect(states, 0, block, found, needs, samples=one)  # what is set up once
        begun = stopwatch.now()
        measured = collect(states, 0, block, found, needs)
        pace = replace(pace, collect=(stopwatch.now() - begun) / len(states))
    if recipe.reconstruction is not None or needs.gradients:
        train, way_back = _time_training(block, states, stopwatch)
        pace = replace(pace, train=train)
    if recipe.allocation is not None and recipe.allocation.needs:
        quick = Recipe("wanda", sparsity=recipe.target_sparsity, group=recipe.group)
        pace = replace(pace, mask=_time_decisions(found, seen, quick, False, stopwatch))
    spent = _time_decisions(found, measured, recipe, report_error, stopwatch)
    return Timed(replace(pace, decide=spent), tuple(widths.values()), groups, way_back)


def _time_decisions(
    found: list[Matrix],
    measured: Collector,
    recipe: Recipe,
    report_error: bool,
    stopwatch: _Stopwatch,
) -> float:
    """What masks and values of a block take: matrices of one shape are timed once."""
    alike: dict[tuple[Any, ...], list[Matrix]] = {}
    for matrix in found:
        seen = matrix.name in measured.inputs
        alike.setdefault((*matrix.weight.shape, matrix.part, seen), []).append(matrix)
    return sum(
        len(matrices) * _time_decision(matrices[0], measured, recipe, report_error, stopwatch)
        for matrices in alike.values()
    )


def _time_decision(
    matrix: Matrix, measured: Collector, recipe: Recipe, report_error: bool, stopwatch: _Stopwatch
) -> float:
    rows = matrix.weight.shape[0]
    inputs = measured.inputs.get(matrix.name)

    def take(count: int) -> float:
        weight, outputs = matrix.weight[:count], None
        if matrix.name in measured.outputs:
            outputs = ChannelStats(count, device=weight.device)
            outputs.add(torch.ones(1, 1, count, device=weight.device))
        watched = inputs if inputs is not None and GRAM in inputs.collect else None
        return stopwatch.of(
            lambda: decide.decide(
                matrix.name, matrix.part, weight, inputs, outputs, recipe, report_error,
                held_out=watched,
            )
        )  # fmt: skip

    if rows <= MORE:
        return take(rows)
    take(FEW)  # what is set up once
    few, more = take(FEW), take(MORE)
    each = max(0.0, more - few) / (MORE - FEW)
    return more + each * (rows - MORE)


def _time_training(
    block: nn.Module, states: Activations, stopwatch: _Stopwatch
) -> tuple[float, int]:
    """A step of Adam on a window, and the bytes its way back keeps."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    weights = {n: p.detach().float().requires_grad_() for n, p in block.named_parameters()}
    adam = torch.optim.Adam(list(weights.values()), lr=0.0)

    def step() -> None:
        adam.zero_grad()
        made = {name: weight.to(states.hidden.dtype) for name, weight in weights.items()}
        states.run(0, block, range(1), made).float().square().mean().backward()
        adam.step()

    with torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step()
        own = sum(kept.get(weight.data_ptr(), 0) for weight in weights.values())
        return stopwatch.of(step), sum(kept.values()) - own


def _time_pass(states: Activations, block: nn.Module, stopwatch: _Stopwatch) -> float:
    """All samples through a block, together where they can be."""

    def pass_by() -> None:
        for samples in states.batches():
            states.run(0, block, samples)

    pass_by()
    return stopwatch.of(pass_by)


def _time_write(block: nn.Module, stored: torch.dtype, stopwatch: _Stopwatch) -> float:
    """Hashing and turning a block's weights into what is stored: what writing costs, but for the
    disk, which the system does on its own."""
    largest = max(block.parameters(), key=lambda parameter: parameter.numel())
    size = sum(parameter.numel() for parameter in block.parameters())

    def write() -> None:
        bits = largest.detach().to(stored).contiguous().view(torch.uint8).cpu().numpy()
        hashlib.sha256(bits.data).digest()

    return stopwatch.of(write) * size / max(largest.numel(), 1)


def why(device: torch.device, asked: str, computed: torch.dtype, stored: torch.dtype) -> str:
    """Which device is used and why, and in what type."""
    return f"{where_and_why(device, asked)}, in {compute.describe(computed, stored, device)}"
