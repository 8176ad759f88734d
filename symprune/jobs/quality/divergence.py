"""Two models on the same windows, block by block: on disk, in memory, or one of each.

A few windows are plenty, for every token says something. Memory holds a block, both models'
hidden states for some windows, both heads, and the logits of some positions at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from symprune.checkpoint.streamed_model import Source, StreamedModel
from symprune.engine import forward
from symprune.engine.arguments import Allocate
from symprune.errors import SympruneError
from symprune.eval.divergence import Divergence, compare, parts, summary
from symprune.machine import distributed
from symprune.models.layout import Layout, find_layout
from symprune.token_loss import check_vocabulary

WINDOWS = 16
"""Windows that are looked at, unless said otherwise."""

Tick = Callable[[int, int], None]


class Walkable(Protocol):
    """A model whose blocks can be entered one after the other, wherever they are."""

    @property
    def layout(self) -> Layout: ...
    def block(self, index: int) -> AbstractContextManager[nn.Module]: ...
    def around(self, head: bool = False) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class OnDisk:
    """A model that is read block by block; source: where from, if not its own files."""

    streamed: StreamedModel
    source: Source | None = None

    @property
    def layout(self) -> Layout:
        return self.streamed.layout

    def block(self, index: int) -> AbstractContextManager[nn.Module]:
        return self.streamed.block(index, self.source)

    def around(self, head: bool = False) -> AbstractContextManager[None]:
        return self.streamed.around(head, self.source)


class InMemory:
    """A loaded model."""

    def __init__(self, model: Any) -> None:
        self.layout = find_layout(model)

    def block(self, index: int) -> AbstractContextManager[nn.Module]:
        return nullcontext(self.layout.blocks[index])

    def around(self, head: bool = False) -> AbstractContextManager[None]:
        return nullcontext()


def diverge(
    dense: Walkable,
    pruned: Walkable,
    windows: Tensor,
    at_once: int = 1,
    tick: Tick = lambda done, total: None,
    allocate: Allocate | None = None,
) -> Divergence:
    """How far `pruned` is from `dense` on `[windows, length]` tokens, `at_once` windows at a time.
    The processes of a run divide them."""
    if _vocabulary(pruned.layout) != _vocabulary(dense.layout):
        raise SympruneError("The models have different vocabularies, so they cannot be compared.")
    mine = torch.arange(len(windows))[distributed.rank() :: distributed.size()]
    kl: dict[int, float] = {}
    same: dict[int, float] = {}
    with _ready(dense, pruned):
        for start in range(0, len(mine), at_once):
            group = mine[start : start + at_once]
            some = windows[group]
            states = [_states(model, some, allocate) for model in (dense, pruned)]
            with dense.around(head=True), pruned.around(head=True):
                for place, number in enumerate(group.tolist()):
                    first, second = (
                        _Head(model.layout, some[place][None], state, place)
                        for model, state in zip((dense, pruned), states, strict=True)
                    )
                    kl[number], same[number] = _compare_window(first, second, some.shape[1])
            tick(min(start + at_once, len(mine)), len(mine))
    kl, same = distributed.gather(kl), distributed.gather(same)
    sums = [(kl[number], int(same[number])) for number in range(len(windows))]
    return summary(sums, windows.shape[1])


@contextmanager
def _ready(*models: Walkable) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(forward.ready(model.layout.model))
        yield


def _states(model: Walkable, windows: Tensor, allocate: Allocate | None) -> forward.Activations:
    """The hidden states behind the last block."""
    embeddings: Any = model.layout.model.get_input_embeddings()  # type: ignore[operator]
    check_vocabulary(windows, embeddings.weight)
    with model.around():
        activations = forward.embed(model.layout, windows, allocate=allocate)
    for index in range(len(model.layout.blocks)):
        with model.block(index) as block:
            activations.advance(index, block)
    return activations


@dataclass(frozen=True)
class _Head:
    """What a model's head makes of one window."""

    layout: Layout
    tokens: Tensor
    activations: forward.Activations
    sample: int

    def logits(self, positions: range) -> Tensor:
        return forward.logits(self.layout, self.tokens, self.activations, self.sample, positions)[0]


def _compare_window(dense: _Head, pruned: _Head, length: int) -> tuple[float, int]:
    kl, same = 0.0, 0
    for positions in parts(length, _vocabulary(dense.layout)):
        found = compare(dense.logits(positions), pruned.logits(positions))
        kl, same = kl + found[0], same + found[1]
    return kl, same


def _vocabulary(layout: Layout) -> int:
    config: Any = layout.model.config
    return int(config.get_text_config().vocab_size)
