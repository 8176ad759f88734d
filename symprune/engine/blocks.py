"""How the walk gets at a model's blocks: one at a time, in order, each entered and left once.

`Blocks` is a model that is in memory as a whole, where there is nothing to fetch. `checkpoint` has
one that reads a block from disk when it is entered and has written it when it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from symprune.engine import forward
from symprune.engine.permute.moves import Move
from symprune.engine.report import Report
from symprune.maskset import MaskSet
from symprune.models.layout import Layout
from symprune.values.grid import OnGrid

Pass = Callable[[forward.Activations, int, nn.Module], None]
"""pass(activations, index, block): what the block makes of them becomes the hidden states."""


@dataclass
class PrunedBlock:
    """What became of a block: its masks by the names of parameters and, by those of matrices, what
    is on a grid. A parameter that several matrices are stacked in has one mask, and values for
    each of them. unrounded is what was rounded to the grid, where somebody goes on from it. moves
    are the parameters whose channels are in another order than they were."""

    masks: MaskSet = field(default_factory=MaskSet)
    values: dict[str, OnGrid] = field(default_factory=dict)
    unrounded: dict[str, Tensor] = field(default_factory=dict)
    moves: list[Move] = field(default_factory=list)

    def add(self, others: PrunedBlock) -> None:
        """What became of more of its matrices."""
        self.masks.update(others.masks)
        self.values |= others.values
        self.unrounded |= others.unrounded


class Blocks:
    """The blocks of a model in memory.

    embedded is what `forward.embed` made of the tokens, for callers that prune again and again.
    stored is the type weights will be written in, if not the one they are computed in. at_once
    samples pass a block together.
    """

    in_memory = True

    def __init__(
        self,
        layout: Layout,
        embedded: forward.Activations | None = None,
        stored: torch.dtype | None = None,
        at_once: int = 1,
    ) -> None:
        self.layout = layout
        self.embedded = embedded
        self.stored = stored
        self.at_once = at_once

    def __len__(self) -> int:
        return len(self.layout.blocks)

    def begin(
        self,
        tokens: Tensor | None,
        report: Report,
        tick: forward.Tick,
        dense: Pass | None = None,
    ) -> tuple[int, forward.Activations | None]:
        """The first block to prune, and the hidden states in front of it (None without tokens).

        Blocks before the first were finished by an earlier run; what it did is put into `report`.
        The hidden states are those behind these pruned blocks or, with `dense`, which passes a
        block, behind the dense ones.
        """
        return 0, None if tokens is None else self.embed(tokens, tick)

    def embed(self, tokens: Tensor, tick: forward.Tick = lambda _: None) -> forward.Activations:
        """The hidden states in front of the first block."""
        if self.embedded is not None:
            return self.embedded.only(range(len(tokens))).copy()
        return self.embed_others(tokens, tick)

    def embed_others(
        self, tokens: Tensor, tick: forward.Tick = lambda _: None
    ) -> forward.Activations:
        """The same for tokens that are none of those this was made for."""
        return forward.embed(self.layout, tokens, tick, at_once=self.at_once)

    def embed_anew(self, tokens: Tensor) -> forward.Activations:
        """The same, of any tokens."""
        return forward.embed(self.layout, tokens)

    def pass_dense(self, tokens: Tensor, first: int, dense: Pass) -> forward.Activations:
        """The dense model's hidden states in front of block `first`, where a run goes on."""
        activations = self.embed(tokens)
        for index in range(first):
            with self.block(index) as block:
                dense(activations, index, block)
        return activations

    @contextmanager
    def around(self) -> Iterator[None]:
        """The parts around the blocks, head included, are there as long as the context lasts."""
        yield

    def reorder(self, moves: list[Move]) -> None:
        """From now on the model's parameters are in another order. One that has several names is
        moved by one of them."""
        named = dict(self.layout.model.named_parameters(remove_duplicate=False))
        for move in {id(named[move.parameter_name]): move for move in moves}.values():
            move.apply(named[move.parameter_name].data)
        self.embedded = None

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """A block whose weights are there as long as the context lasts."""
        yield self.layout.blocks[index]

    def head(self) -> AbstractContextManager[None]:
        """What is around the blocks has its weights as long as the context lasts, for
        `forward.logits`."""
        return nullcontext()

    def finish(
        self,
        index: int,
        report: Report,
        pruned: PrunedBlock,
        activations: forward.Activations | None,
    ) -> None:
        """The block, still entered, is done; this is what became of it."""
        report.masks.update(pruned.masks)
        report.values.update(pruned.values)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()`, a value that JSON can hold, made only once for a run however often it is
        interrupted."""
        return make()
