"""Scores -> an order of input channels in which N:M keeps more: what a recipe's `permute` asks for.

RIA, section 4.2 (Zhang et al., ICLR 2024): channels are dealt out by importance, then exchanged
among the groups of M. `order` is the search, `assignment` the problem it solves again and again.
"""

from __future__ import annotations

from collections.abc import Iterable

from symprune.errors import SympruneError
from symprune.validation import check_choice

MLP, HEADS, RESIDUAL = "mlp", "heads", "residual"
PARTS = (MLP, HEADS, RESIDUAL)
ALL = "all"
AUTO = "auto"
"""Every part that a model's structure allows; where there is nothing to permute, nothing."""


class CannotPermute(SympruneError):
    """Channels that may not change places. why is a sentence without its end."""

    def __init__(self, why: str, part: str = "") -> None:
        super().__init__(f"{why}: leave {f'{part} out of ' if part else 'out '}--permute.")
        self.why = why


def choose_parts(asked: str | Iterable[str] | None) -> tuple[str, ...]:
    """What a recipe's `permute` says: nothing, `auto`, `all`, or parts, as a list or with commas
    between them. In the order of `PARTS`, each once."""
    if asked is None:
        return ()
    if asked == AUTO:
        return PARTS
    given = asked.split(",") if isinstance(asked, str) else asked
    if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
        raise SympruneError(f"permute is a list of {', '.join(PARTS)}, not {asked!r}.")
    names = [name.strip() for name in given]
    for name in names:
        check_choice("permute", name, (*PARTS, ALL))
    return tuple(part for part in PARTS if part in names or ALL in names)
