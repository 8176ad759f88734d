"""Perplexity of a model that stays on disk: text goes through it block by block.

Windows go through it in groups whose hidden states fit into memory; the model is read once for each
group. The figure is the one `eval.perplexity` gives for the model in memory, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from symprune.checkpoint.streamed_model import Source, StreamedModel
from symprune.engine import forward
from symprune.engine.arguments import Allocate
from symprune.engine.text.bos import Losses
from symprune.eval.perplexity import Perplexity, cut, summary
from symprune.machine import distributed
from symprune.token_loss import check_vocabulary, loss


def perplexity(
    streamed: StreamedModel,
    ids: Tensor,
    seqlen: int,
    max_windows: int | None = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
    written: Source | None = None,
    at_once: int = 1,
    allocate: Allocate | None = None,
    bos: int | None = None,
) -> Perplexity:
    """Perplexity on one row of token ids, `at_once` windows at a time.

    written holds the model's weights, if not its own files. bos is the token windows
    begin with, if any.
    """
    windows = cut(ids, seqlen, max_windows, bos)
    mine = torch.arange(len(windows))[distributed.rank() :: distributed.size()]
    losses: dict[int, float] = {}
    with forward.ready(streamed.model):
        for start in range(0, len(mine), at_once):
            group = mine[start : start + at_once]

            def part(done: float, start: int = start, count: int = len(group)) -> None:
                tick(int((start + count * done) * len(windows) / len(mine)), len(windows))

            found = _losses(streamed, windows[group], part, written, allocate)
            losses |= dict(zip(group.tolist(), found, strict=True))
    tick(len(windows), len(windows))
    losses = distributed.gather(losses)
    return summary([losses[number] for number in range(len(windows))], seqlen)


def _losses(
    streamed: StreamedModel,
    windows: Tensor,
    part: Callable[[float], None],
    written: Source | None,
    allocate: Allocate | None,
    predicted: list[slice] | None = None,
) -> list[float]:
    layout, steps = streamed.layout, len(streamed) + 1
    wanted = predicted or [slice(1, None)] * len(windows)
    check_vocabulary(windows, streamed.model.get_input_embeddings().weight)
    with streamed.around(source=written):
        at_once = streamed.batch_size(windows.shape[1])
        activations = forward.embed(layout, windows, allocate=allocate, at_once=at_once)
    for index in range(len(streamed)):
        with streamed.block(index, written) as block:
            activations.advance(index, block)
        part((index + 1) / steps)
    with streamed.around(head=True, source=written):
        return [
            loss(forward.logits(layout, window[None], activations, number), window, part_of_it)
            for number, (window, part_of_it) in enumerate(zip(windows, wanted, strict=True))
        ]


def losses_of(streamed: StreamedModel) -> Losses:
    """The losses of windows of text, all at once, for a model that stays on disk."""

    def losses(windows: Tensor, predicted: list[slice]) -> list[float]:
        with forward.ready(streamed.model):
            return _losses(streamed, windows, lambda _: None, None, None, predicted)

    return losses


def windows_at_once(streamed: StreamedModel, seqlen: int, samples: int) -> int:
    """As many windows as calibration samples, or as take the room of one block, if that is more."""
    window = seqlen * streamed.width * streamed.compute.itemsize
    block = sum(p.numel() * p.element_size() for p in streamed.layout.blocks[0].parameters())
    return max(1, samples, block // window)
