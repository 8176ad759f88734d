"""The refinements a recipe may ask for: name, options with the papers' defaults, what to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from symprune.errors import SympruneError
from symprune.masks import Pattern
from symprune.refine import dsnot, swap
from symprune.stats import GRAM, MOMENTS, SHRINK, ChannelStats
from symprune.validation import check_choice, check_not_negative, check_positive, choose, written

PARTS = ("attn", "mlp", "all")
ACCEPT = ("published", "improving")
PRESETS = {
    # Thesis, Table E.4. Tables 6.5 and E.4 carry each other's perplexities for the two bases (18.99
    # and 20.50), so the labels of one of them may be swapped: either preset goes with any base.
    "wanda": {"grow_relative": True, "prune_relative": False, "gamma1": 0.0, "gamma2": 1e-4},
    "ria": {"grow_relative": False, "prune_relative": True, "gamma1": 0.0, "gamma2": 1e-3},
}
RELATIVE_METHODS = ("ria", "stochria", "ri", "lp", "col-sum", "row-sum", "symwanda")


@dataclass(frozen=True)
class DSnoT:
    """DSnoT (thesis 6.3.6): exchanges that bring each row's expected error towards zero.

    layers: which part of a block is refined; the published default leaves the MLP alone. accept:
    `published` makes every exchange, `improving` only those that shrink the error.
    """

    name: ClassVar[str] = "dsnot"
    needs: ClassVar[str] = MOMENTS
    layers: str = "attn"
    max_cycles: int = 50
    update_threshold: float = 0.1
    var_power: float = 1.0
    same_sign: bool = False
    accept: str = "improving"

    def __post_init__(self) -> None:
        check_choice("layers", self.layers, PARTS)
        check_choice("accept", self.accept, ACCEPT)
        check_positive(max_cycles=self.max_cycles)

    def keys(self, base: str) -> dsnot.Keys:
        return dsnot.Keys(var_power=self.var_power)

    def __call__(
        self, weight: Tensor, keep: Tensor, stats: ChannelStats, pattern: Pattern | None, base: str
    ) -> Tensor:
        """The refined mask of a matrix whose base mask was made by the method `base`."""
        return dsnot.dsnot(
            weight,
            keep,
            stats,
            keys=self.keys(base),
            max_cycles=self.max_cycles,
            update_threshold=self.update_threshold,
            same_sign=self.same_sign,
            accept=self.accept,
            pattern=pattern,
        )


@dataclass(frozen=True)
class R2DSnoT(DSnoT):
    """R2-DSnoT (Eq. 6.5, 6.6): relative importance in growing or pruning, and a regulariser.

    preset: `wanda` or `ria`, the two best settings of Table E.4; left out, it follows the base
    method. Options that are given replace the preset's. alpha is the power of the input norm in the
    relative prune key: 0.5 in Table 6.5, 1 as in DSnoT, 2 for "squared activation".
    """

    name: ClassVar[str] = "r2-dsnot"
    preset: str | None = None
    grow_relative: bool | None = None
    prune_relative: bool | None = None
    gamma1: float | None = None
    gamma2: float | None = None
    norm_p: float = 2.0
    alpha: float = 0.5
    literal_growth: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset is not None:
            check_choice("preset", self.preset, tuple(PRESETS))
        if not self.norm_p >= 1:
            raise SympruneError(f"norm_p must be at least 1 (inf is one), not {self.norm_p}.")

    def keys(self, base: str) -> dsnot.Keys:
        preset = PRESETS[self.preset or ("ria" if base in RELATIVE_METHODS else "wanda")]
        given = {name: getattr(self, name) for name in preset if getattr(self, name) is not None}
        return dsnot.Keys(
            var_power=self.var_power,
            alpha=self.alpha,
            norm_p=self.norm_p,
            literal_growth=self.literal_growth,
            **{**preset, **given},
        )


@dataclass(frozen=True)
class Swap:
    """Exact one-for-one swaps that lower the layer's true error on the calibration data.

    shrink: how far measured correlations are distrusted, in units of channels / tokens.
    """

    name: ClassVar[str] = "swap"
    needs: ClassVar[str] = GRAM
    layers: str = "all"
    max_swaps: int = 60
    candidates: int = 8
    shrink: float = SHRINK

    def __post_init__(self) -> None:
        check_choice("layers", self.layers, PARTS)
        check_positive(max_swaps=self.max_swaps, candidates=self.candidates)
        check_not_negative(shrink=self.shrink)

    def __call__(
        self, weight: Tensor, keep: Tensor, stats: ChannelStats, pattern: Pattern | None, base: str
    ) -> Tensor:
        return swap.swap(
            weight,
            keep,
            stats.gram,
            max_swaps=self.max_swaps,
            candidates=self.candidates,
            shrink=self.shrink * stats.noise,
            pattern=pattern,
        )


Refinement = DSnoT | Swap
REFINEMENTS: dict[str, type[Any]] = {kind.name: kind for kind in (DSnoT, R2DSnoT, Swap)}


def refinement(options: str | Mapping[str, Any] | None) -> Refinement | None:
    """What a recipe's `refine` says: nothing, a name, or a name with options."""
    return choose("refinement", REFINEMENTS, options)


def to_dict(chosen: Refinement | None) -> dict[str, Any] | None:
    return None if chosen is None else written(chosen.name, chosen)
