"""How much each layer gives, by trial: a few candidates, and which of them a pruned model is best
with. The trial itself, which runs the model, is `engine.allocation.trial`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import ClassVar

from torch import Tensor

from symprune.allocate.atp import atp
from symprune.allocate.budget import Layer, equal_shares
from symprune.allocate.lsa import LSA, lsa
from symprune.allocate.owl import OWL, owl
from symprune.errors import SympruneError
from symprune.stats import ChannelStats
from symprune.validation import check_positive

UNIFORM = "uniform"
RULES = {"owl": owl, "lsa": lsa, "atp": atp}
FIRST, OTHERS = 0.08, (0.04, 0.15)
"""How far apart the layers are, at first and then; less than nothing where a rule is turned
round."""
CANDIDATES = 1 + 2 * len(RULES), 2 + len(OTHERS)
"""How many are tried, at first and then."""


@dataclass(frozen=True)
class Search:
    """OWL, LSA and ATP, each as it is and turned round, and equal shares: tried on windows that
    nothing else is decided on. On a third of these the best rule is found, on the others how far
    apart it is to take the layers, if at all.

    A candidate is tried by Wanda's mask on the dense model's statistics, and judged by how far the
    predictions are from the dense model's. windows: how many are predicted. share: of what a
    candidate takes from every matrix, how much is gone in the trial. Wanda's mask alone does more
    harm than a recipe that re-fits what stays, and of models without any sense the best is chance.
    """

    name: ClassVar[str] = "search"
    needs: ClassVar[frozenset[str]] = OWL.needs | LSA.needs
    looks_at_outputs: ClassVar[bool] = False
    windows: int = 8
    share: float = 0.75

    def __post_init__(self) -> None:
        check_positive(windows=self.windows, share=self.share)
        if self.share > 1:
            raise SympruneError(f"share is at most 1, not {self.share:g}.")

    def milder(self, counts: Mapping[str, int]) -> dict[str, int]:
        """What is gone of every matrix in a candidate's trial."""
        return {name: round(self.share * count) for name, count in counts.items()}

    def measure(
        self,
        layer: Layer,
        weight: Tensor,
        inputs: ChannelStats,
        outputs: ChannelStats | None,
        sparsity: float,
    ) -> Layer:
        for rule in (OWL(), LSA()):
            layer = rule.measure(layer, weight, inputs, outputs, sparsity)
        return layer


def candidates(layers: list[Layer], sparsity: float) -> dict[str, dict[str, int]]:
    """What is tried at first: a name and every matrix's count. Of equal ones the first stays."""
    found = {UNIFORM: equal_shares(layers)}
    for rule in RULES:
        for spread in (FIRST, -FIRST):
            _add(found, rule, layers, sparsity, spread)
    return found


def finalists(
    tried: Mapping[str, dict[str, int]],
    divergence: Mapping[str, Sequence[float]],
    layers: list[Layer],
    sparsity: float,
) -> dict[str, dict[str, int]]:
    """What is tried then: equal shares, and the best of the rules, with other spreads too."""
    means = {name: fmean(divergence[name]) for name in tried if name != UNIFORM}
    best = min(means, key=lambda name: (not math.isfinite(means[name]), means[name]))
    found, rule = {UNIFORM: tried[UNIFORM], best: tried[best]}, best.split()[0]
    for spread in OTHERS:
        _add(found, rule, layers, sparsity, -spread if "-" in best else spread)
    return found


def _add(
    found: dict[str, dict[str, int]], rule: str, layers: list[Layer], sparsity: float, spread: float
) -> None:
    counts = RULES[rule](layers, sparsity, spread)
    if counts not in found.values():
        found[f"{rule} {spread:g}"] = counts


def split_windows(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Those the rule is found on, and those that decide; all for both where they are too few."""
    first = len(windows) // 3
    return (windows[:first], windows[first:]) if first else (windows, windows)


def choose(divergence: Mapping[str, Sequence[float]]) -> str:
    """The candidate with the lowest mean over windows, among those that are better than equal
    shares by more than the standard error of the difference; without any, equal shares."""
    equal, best = divergence[UNIFORM], UNIFORM
    for name, own in divergence.items():
        gains = [before - after for before, after in zip(equal, own, strict=True)]
        if len(gains) < 2 or not all(map(math.isfinite, gains)):
            continue
        clear = fmean(gains) > stdev(gains) / math.sqrt(len(gains))
        if clear and fmean(own) < fmean(divergence[best]):
            best = name
    return best
