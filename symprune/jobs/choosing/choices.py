"""What a recommendation chooses among: recipes that ship, amounts, and types of values, and how
much a model takes on disk with each, once it is packed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from symprune.errors import SympruneError
from symprune.recipe import Recipe
from symprune.runtime.layout import BITS
from symprune.runtime.tiles import GROUP

RECIPES = ("fast", "balanced")  # of those that ship, what takes one pass or a few
KINDS = (None, "int8", "int4", "int3")  # from wide to narrow
AMOUNTS = tuple(step / 20 for step in range(17))  # 0, 5 %, ... 80 %
SCALE_BITS = 16


@dataclass(frozen=True)
class Weights:
    """A model's weights: how many its blocks' matrices have, how many it has around them, and the
    bits of one as it is stored."""

    inside: int
    around: int
    bits: int

    @property
    def dense_bytes(self) -> float:
        return (self.inside + self.around) * self.bits / 8


@dataclass(frozen=True)
class Choice:
    """A recipe by its name, how much goes, and what the kept values are."""

    recipe: str
    sparsity: float
    values: str | None

    def build(self, shared: Mapping[str, Any]) -> Recipe:
        """As it is run; shared says what it is calibrated on."""
        if self.sparsity == 0:
            return Recipe(sparsity=0.0, values=self.values, **shared)
        return Recipe.named(self.recipe).with_changes(
            sparsity=self.sparsity, values=self.values, **shared
        )

    def bytes(self, weights: Weights) -> float:
        """What the weights take on disk, packed; embeddings and head as they are stored."""
        return (weights.inside * self.bits(weights) + weights.around * weights.bits) / 8

    def bits(self, weights: Weights) -> float:
        """Of a weight of the matrices: kept values, a bit of mask, a share of a scale. Codes of a
        group are filled up to whole bytes: by half of what is missing, on average."""
        found = float(weights.bits)
        if self.values is not None:
            found = BITS[self.values]
        wide = found
        found *= 1 - self.sparsity
        if self.values is not None:
            found += SCALE_BITS / GROUP
        if self.sparsity > 0:
            found += 1 + ((8 - wide) / 2 / GROUP if wide < 8 else 0)
        return found

    def describe(self) -> str:
        """`balanced, 45 %, int8`"""
        kept = "" if self.values is None else f", {self.values}"
        return (
            f"all weights{kept}" if self.sparsity == 0 else f"{self.recipe}, {self._amount}{kept}"
        )

    @property
    def _amount(self) -> str:
        return f"{100 * self.sparsity:.0f} %"

    def command(self, model: str, shared: Mapping[str, Any]) -> str:
        """What does to the model what was tried."""
        parts = ["symprune prune --model", shlex.quote(model)]
        parts += [] if self.sparsity == 0 else ["--recipe", self.recipe]
        parts += ["--sparsity", f"{self.sparsity:g}"]
        parts += [] if self.values is None else ["--values", self.values]
        for name in ("calibration", "nsamples", "seqlen"):
            parts += [f"--{name}", shlex.quote(str(shared[name]))]
        return " ".join(parts)


def small_enough(weights: Weights, most: float) -> list[Choice]:
    """Of every type of values the least amount that takes at most so many bytes, by every recipe;
    with all weights kept, the recipe does not matter, and narrower values are no better."""
    found: list[Choice] = []
    for kind in KINDS:
        fits = (Choice(RECIPES[-1], amount, kind) for amount in AMOUNTS)
        first = next((choice for choice in fits if choice.bytes(weights) <= most), None)
        if first is None or (first.sparsity == 0 and kind is None):
            continue
        if first.sparsity == 0:
            return [*found, Choice(RECIPES[-1], 0.0, kind)]
        found += [Choice(recipe, first.sparsity, kind) for recipe in RECIPES]
    return found


@dataclass
class Ladder:
    """The search, for one type of values, for the largest amount that is still good enough: what is
    good with an amount is good with less. A ladder asks for one choice at a time."""

    kind: str | None
    good: int = -1  # the highest rung known to be good
    bad: int = len(AMOUNTS[::2])  # the lowest known not to be

    @property
    def rungs(self) -> list[Choice]:
        """Every tenth; as stored and whole is the dense model itself."""
        amounts = AMOUNTS[::2][1 if self.kind is None else 0 :]
        return [Choice(RECIPES[-1], amount, self.kind) for amount in amounts]

    def next(self) -> Choice | None:
        """What is to be tried; None when it is known. All weights kept is first: where that is too
        much, nothing else of this type is tried."""
        rungs = self.rungs
        top = min(self.bad, len(rungs))
        if self.good + 1 >= top:
            return None
        if self.good < 0 and self.kind is not None:
            return rungs[0]
        return rungs[(self.good + top) // 2]

    def hear(self, choice: Choice, is_good: bool) -> None:
        place = self.rungs.index(choice)
        if is_good:
            self.good = max(self.good, place)
        else:
            self.bad = min(self.bad, place)


def most_trials(ladders: Iterable[Ladder]) -> int:
    """How many choices ladders ask for, at most."""
    count = 0
    for ladder in ladders:
        span = len(ladder.rungs) - (ladder.kind is not None)
        count += span.bit_length() + (ladder.kind is not None)
    return count


def pick(
    results: Sequence[Mapping[str, Any]], size: float | None, perplexity: float | None
) -> Mapping[str, Any] | None:
    """Of the results, the lowest perplexity within a size, or the smallest within a perplexity."""
    if size is not None:
        fits = [each for each in results if each["bytes"] <= size]
        return min(fits, key=lambda each: each["perplexity"], default=None)
    assert perplexity is not None
    fits = [each for each in results if each["perplexity"] <= perplexity]
    return min(fits, key=lambda each: each["bytes"], default=None)


def read_size(text: str) -> float:
    """`60%` -> 0.6: a share of the dense model's size."""
    share = _read_percent(text, "--size")
    if not 0 < share < 1:
        raise SympruneError(
            f"--size is a share of the dense model's, above 0 % and below 100 %: {text!r} is not."
        )
    return share


def read_loss(text: str) -> float:
    """`+10%` -> 0.1: how much higher the perplexity may be."""
    share = _read_percent(text.removeprefix("+"), "--perplexity")
    if not 0 < share <= 10:
        raise SympruneError(
            "--perplexity says how much it may rise, above 0 % and at most 1000 %: "
            f"{text!r} is not that."
        )
    return share


def _read_percent(text: str, option: str) -> float:
    number, sign, rest = text.strip().partition("%")
    try:
        found = float(number)
    except ValueError:
        found = float("nan")
    if not sign or rest or found != found:
        raise SympruneError(f"{option} is in percent, as in 60%: {text!r} is not.")
    return found / 100
