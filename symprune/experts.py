"""Which experts of a mixture go: REAP's score (router-weighted expert activation pruning), and the
lowest of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.errors import SympruneError

_DROP = re.compile(r"drop:(\d+(?:\.\d+)?)%")


@dataclass(frozen=True)
class Drop:
    """The share of every layer's experts that goes: `drop:25%`."""

    share: float

    @classmethod
    def parse(cls, text: str) -> Drop:
        found = _DROP.fullmatch(text) if isinstance(text, str) else None
        share = float(found[1]) / 100 if found else 0.0
        if not 0 < share < 1:
            raise SympruneError(
                f"experts {text!r} is not drop:P% with P above 0 and below 100, as in drop:25%."
            )
        return cls(share)

    def __str__(self) -> str:
        return f"drop:{100 * self.share:g}%"

    def count(self, experts: int, groups: int = 1) -> int:
        """How many of a layer's experts go, the same from each of its groups."""
        return groups * round(self.share * (experts // groups))


def score(gates: Tensor, outputs: Tensor) -> Tensor:
    """What each token that was routed to an expert says of it: the router's weight times the norm
    of the expert's output. REAP's score is the mean."""
    return gates.float() * torch.linalg.vector_norm(outputs.float(), dim=-1)


def choose_kept(
    scores: Sequence[float], tokens: Sequence[int], dropped: int, groups: int = 1
) -> list[int]:
    """The numbers of the experts that stay, in order. Of equal scores the expert with fewer tokens
    goes first, then the later one."""
    size = len(scores) // groups
    kept: list[int] = []
    for first in range(0, len(scores), size):
        group = range(first, first + size)
        ranked = sorted(group, key=lambda each: (-scores[each], -tokens[each], each))
        kept += sorted(ranked[: size - dropped // groups])
    return kept
