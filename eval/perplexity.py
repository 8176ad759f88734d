"""Perplexity as the papers measure it: one long text, non-overlapping windows, mean token NLL."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from symprune.errors import SympruneError


@dataclass(frozen=True)
class Perplexity:
    """exp(mean negative log likelihood) over `windows` windows of `seqlen` tokens."""

    perplexity: float
    nll: float
    windows: int
    seqlen: int

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@torch.no_grad()
def perplexity(
    model: Any,
    ids: Tensor,
    seqlen: int = 2048,
    max_windows: int | None = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """Perplexity of `model` on one row of token ids.

    The row is cut into windows of `seqlen`, a remainder is left out, and in each window every token
    but the first is predicted from those before it.
    """
    windows = cut(ids, seqlen, max_windows)
    training, device = model.training, model.get_input_embeddings().weight.device
    model.eval()
    losses = []
    for number, window in enumerate(windows):
        logits = model(input_ids=window.unsqueeze(0).to(device), use_cache=False).logits
        losses.append(loss(logits, window))
        tick(number + 1, len(windows))
    model.train(training)
    return summary(losses, seqlen)


def cut(ids: Tensor, seqlen: int, max_windows: int | None = None) -> Tensor:
    """`[windows, seqlen]` from one row of token ids, without its remainder."""
    count = len(ids) // seqlen
    if count == 0 or seqlen < 2:
        raise SympruneError(
            f"The evaluation text has {len(ids)} tokens, too few for one window of {seqlen}."
        )
    count = min(count, max_windows) if max_windows else count
    return ids[: count * seqlen].view(count, seqlen)


def loss(logits: Tensor, window: Tensor) -> float:
    """Mean negative log likelihood of a window's tokens but the first."""
    return float(F.cross_entropy(logits[0, :-1].float(), window[1:].to(logits.device)))


def summary(losses: list[float], seqlen: int) -> Perplexity:
    """The figure of a text from those of its windows, in order."""
    nll = sum(losses) / len(losses)
    return Perplexity(math.exp(nll) if nll < 700 else math.inf, nll, len(losses), seqlen)
