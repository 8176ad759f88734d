"""Candidates for how much each layer gives, tried: how far a quickly pruned model's predictions are
from the dense model's.

All candidates' hidden states go through a block while it is there, each with the block's weights
under a mask of its own, and the dense model's beside them. So the model is read once, and its
weights are never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from symprune import masks
from symprune.allocate.budget import wanda_score
from symprune.engine import forward
from symprune.engine.blocks import Blocks
from symprune.engine.forward import Activations, Watch
from symprune.errors import SympruneError
from symprune.machine import distributed, host, memory
from symprune.models.layout import Layout
from symprune.models.matrices import Matrix
from symprune.wording import counted

PIECE = 2**24  # of predicted numbers that are compared at once


@dataclass(frozen=True)
class Trial:
    """Candidates by name, each with a count for every matrix; the norms of the dense model's
    inputs, which Wanda's masks are made from; and the group the lowest scores are taken of."""

    layout: Layout
    blocks: Blocks
    candidates: Mapping[str, Mapping[str, int]]
    norms: Mapping[str, Tensor]
    group: str

    def run(
        self, windows: Tensor, watch: Watch, tell: Callable[[str], None]
    ) -> dict[str, list[float]]:
        """For each candidate and window, the mean over tokens of KL(dense || pruned).

        Processes share the windows, and all of them get all figures.
        """
        mine = distributed.share(torch.arange(len(windows)), every=False)
        measured = self._measure(windows[mine], watch, tell) if len(mine) else []
        found = {
            place * len(windows) + number: value
            for place, values in enumerate(measured)
            for number, value in zip(mine.tolist(), values, strict=True)
        }
        everyone = distributed.gather(found)
        return {
            name: [everyone[place * len(windows) + number] for number in range(len(windows))]
            for place, name in enumerate(self.candidates)
        }

    def _measure(
        self, windows: Tensor, watch: Watch, tell: Callable[[str], None]
    ) -> list[list[float]]:
        """Of this process's windows, a list for each candidate."""
        blocks, count = self.blocks, len(self.candidates)
        dense = blocks.embed_others(windows)
        tell(_check_memory(dense, count))
        states = {name: dense.copy() for name in self.candidates}
        for index in range(len(blocks)):
            with blocks.block(index) as block:
                found = [m for m in self.layout.matrices(index) if m.name in self.norms]
                scores = {m.name: wanda_score(m.weight, self.norms[m.name]) for m in found}
                for name, pruned in states.items():
                    weights = self._masked(index, found, scores, self.candidates[name])
                    pruned.advance(index, block, weights=weights)
                dense.advance(index, block)
            watch("try", index, len(blocks), len(windows), len(windows), "")
        with blocks.head():
            figures = [
                value
                for number in range(len(windows))
                for value in self._compare(windows, number, dense, states.values())
            ]
        brought = host.bring(figures)
        return [brought[place::count] for place in range(count)]

    def _masked(
        self,
        index: int,
        found: Iterable[Matrix],
        scores: Mapping[str, Tensor],
        counts: Mapping[str, int],
    ) -> dict[str, Tensor]:
        """Copies of a block's weights without those of the lowest scores, by the names they have in
        the block."""
        prefix, weights = f"{self.layout.prefix}.{index}.", dict[str, Tensor]()
        for matrix in found:
            name = matrix.parameter_name.removeprefix(prefix)
            if name not in weights:
                weights[name] = matrix.parameter.detach().clone()
            keep = masks.keep_ordered(scores[matrix.name], counts[matrix.name], self.group)
            matrix.slice_of(weights[name]).masked_fill_(~keep, 0)
        return weights

    def _compare(
        self, windows: Tensor, number: int, dense: Activations, states: Iterable[Activations]
    ) -> list[Tensor]:
        """A window's divergence for each candidate."""
        window = windows[number : number + 1]
        aim = forward.logits(self.layout, window, dense, number)[0].float()
        expected = aim.softmax(-1)
        least = _surprise(aim, expected)
        del aim
        return [
            _surprise(forward.logits(self.layout, window, each, number)[0], expected) - least
            for each in states
        ]


def _surprise(logits: Tensor, expected: Tensor) -> Tensor:
    """The mean over tokens of the cross entropy, in pieces that take little memory."""
    at_once = max(1, PIECE // logits.shape[-1])
    parts = [
        F.cross_entropy(some.float(), wanted, reduction="none").sum(dtype=torch.float64)
        for some, wanted in zip(logits.split(at_once), expected.split(at_once), strict=True)
    ]
    return torch.stack(parts).sum() / len(logits)


def _check_memory(dense: Activations, count: int) -> str:
    """What the candidates' hidden states take, as a sentence; an error when it is too much."""
    hidden = dense.hidden
    needed, free = count * hidden.numel() * hidden.element_size(), memory.free(hidden.device)
    what = f"{count} allocations on {counted(len(dense), 'window')}"
    if needed > free and dense.arguments.in_memory:
        raise SympruneError(
            f"The hidden states of {what} need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are "
            "free; pass --offload-activations, or fewer windows in the recipe's allocate."
        )
    return f"Trying {what}: {needed / 1e6:,.0f} MB for their hidden states"
