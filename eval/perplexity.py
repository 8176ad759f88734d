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
from symprune.token_loss import check_vocabulary, loss


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
    bos: int | None = None,
) -> Perplexity:
    """Perplexity of `model` on one row of token ids.

    The row is cut into windows of `seqlen`, a remainder is left out, and in each window every token
    but the first is predicted from those before it. With bos, that first token is BOS and the text
    is the `seqlen - 1` behind it: as many predictions a window, of every token of the text.
    """
    windows = cut(ids, seqlen, max_windows, bos)
    embeddings = model.get_input_embeddings().weight
    check_vocabulary(windows, embeddings)
    training, device = model.training, embeddings.device
    model.eval()
    losses = []
    for number, window in enumerate(windows):
        logits = model(input_ids=window.unsqueeze(0).to(device), use_cache=False).logits
        losses.append(loss(logits, window))
        tick(number + 1, len(windows))
    model.train(training)
    return summary(losses, seqlen)


def cut(ids: Tensor, seqlen: int, max_windows: int | None = None, bos: int | None = None) -> Tensor:
    """`[windows, seqlen]` from one row of token ids, without its remainder; with bos, each window
    begins with that token, and one that the row itself begins with is left out."""
    length = seqlen if bos is None else seqlen - 1
    if bos is not None and ids[:1].tolist() == [bos]:
        ids = ids[1:]
    if seqlen < 2 or len(ids) < length:
        raise SympruneError(
            f"The evaluation text has {len(ids)} tokens, too few for one window of {seqlen}."
        )
    count = len(ids) // length
    count = min(count, max_windows) if max_windows else count
    windows = ids[: count * length].view(count, length)
    return windows if bos is None else F.pad(windows, (1, 0), value=bos)


def summary(losses: list[float], seqlen: int) -> Perplexity:
    """The figure of a text from those of its windows, in order."""
    nll = sum(losses) / len(losses)
    return Perplexity(math.exp(nll) if nll < 700 else math.inf, nll, len(losses), seqlen)
