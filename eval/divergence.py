"""How far a pruned model is from the dense one, token by token: far more sensitive than accuracy.

KL(dense || pruned) is the mean over tokens of sum_v p(v) (log p(v) - log q(v)), in nats: what the
pruned model's prediction q costs who expects the dense one's p. Agreement is the share of tokens
where both find the same next token the likeliest. Neither needs to know which token comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

AT_ONCE = 2**24  # logits of a model that are looked at together, in fp32


DIGITS = 6
"""Of a divergence behind the point: below are the roundings of two sets of logits."""


@dataclass(frozen=True)
class Divergence:
    """Over the tokens of `windows` windows of `seqlen` tokens; every token but the first of a
    window is predicted."""

    kl: float
    agreement: float
    windows: int
    seqlen: int

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def parts(length: int, vocabulary: int) -> Iterator[range]:
    """The positions of a window that predict a token, as many together as memory should hold."""
    size = max(1, AT_ONCE // max(vocabulary, 1))
    for start in range(0, length - 1, size):
        yield range(start, min(start + size, length - 1))


def compare(dense: Tensor, pruned: Tensor) -> tuple[float, int]:
    """The sum of KL(dense || pruned) over positions `[positions, vocabulary]`, and at how many of
    them both have the same likeliest token."""
    p, q = (logits.float().log_softmax(-1) for logits in (dense, pruned.to(dense.device)))
    same = int((p.argmax(-1) == q.argmax(-1)).sum())
    each = p.exp() * (p - q)
    # What is impossible in the dense model costs nothing, whatever the pruned one says of it.
    each = torch.where(p == -math.inf, torch.zeros_like(each), each)
    return float(each.sum(-1).double().sum()), same


def summary(found: Iterable[tuple[float, int]], seqlen: int) -> Divergence:
    """The figures of all windows from the sums of each."""
    sums = list(found)
    tokens = len(sums) * (seqlen - 1)
    # Rounding can leave a sum of nothing just below it.
    kl = round(max(0.0, math.fsum(kl for kl, _ in sums) / tokens), DIGITS)
    return Divergence(kl, sum(same for _, same in sums) / tokens, len(sums), seqlen)
