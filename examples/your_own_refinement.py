"""A refinement of your own: mask + statistics -> a better mask that keeps as many weights per row.

It is a frozen dataclass whose fields are its options. `needs` names the statistics to collect,
`layers` the part of a block it applies to. This one keeps, in every row, the heaviest weight if the
criterion threw it out, in exchange for the lightest weight the criterion kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tiny import tiny_model, tiny_tokens
from torch import Tensor

from symprune import Recipe, prune
from symprune.masks import Pattern
from symprune.refine import REFINEMENTS
from symprune.stats import SQUARE, ChannelStats


@dataclass(frozen=True)
class KeepHeaviest:
    """The heaviest weight of a row stays."""

    name: ClassVar[str] = "keep-heaviest"
    needs: ClassVar[str] = SQUARE
    layers: str = "all"

    def __call__(
        self, weight: Tensor, keep: Tensor, stats: ChannelStats, pattern: Pattern | None, base: str
    ) -> Tensor:
        size = weight.abs()
        heaviest = size.argmax(1, keepdim=True)
        lightest = size.masked_fill(~keep, float("inf")).argmin(1, keepdim=True)
        swapped = keep.scatter(1, lightest, keep.gather(1, heaviest)).scatter(1, heaviest, True)
        return swapped if pattern is None else keep  # N:M groups would have to swap inside


REFINEMENTS[KeepHeaviest.name] = KeepHeaviest


def main() -> None:
    plain = prune(tiny_model(), tiny_tokens(), Recipe("wanda", sparsity=0.8))
    refined = prune(
        tiny_model(), tiny_tokens(), Recipe("wanda", sparsity=0.8, refine="keep-heaviest")
    )
    changed = sum(int((refined.masks[name] != plain.masks[name]).sum()) for name in plain.masks)
    print(f"{changed // 2} weights changed places; still {refined.removed:,} are gone.")


if __name__ == "__main__":
    main()
