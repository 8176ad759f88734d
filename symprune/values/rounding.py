"""Weights on a grid, found jointly with the mask: what a recipe's `values` asks for.

The codes of the weights that stay are chosen for the least error of the layer's outputs, so that
the rounding of one weight makes up for that of others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.machine import host
from symprune.masks import Pattern
from symprune.stats import GRAM, SHRINK, ChannelStats
from symprune.update.damped_gram import DampedGram
from symprune.validation import check_choice, check_not_negative, check_positive
from symprune.values.descent import descend, find_start
from symprune.values.exchange import exchange
from symprune.values.gptq import Found, Spreading, gptq
from symprune.values.grid import GRIDS, Grid, OnGrid
from symprune.values.scales import round_to_grid

SOLVES = ("descent", "gptq", "nearest")
FIT_ITERS = 20


@dataclass(frozen=True)
class Rounding:
    """Kept weights on the grid that is its name.

    solve: `descent`, coordinate descent from the better of the other two; `gptq`, SparseGPT's
    column loop, which without a mask is GPTQ; `nearest`, each weight by itself. sweeps: of the
    descent, over all columns. exchanges: further ones that find mask and codes together, where the
    mask is nobody else's choice. damping, shrink: as in `LeastSquares`. zero: whether one of the
    levels is; left out, a recipe has one where it removes no weights.
    """

    name: ClassVar[str]
    solve: str = "descent"
    sweeps: int = 3
    exchanges: int = 4
    damping: float = 0.01
    shrink: float = SHRINK
    zero: bool | None = None

    def __post_init__(self) -> None:
        check_choice("solve", self.solve, SOLVES)
        check_positive(sweeps=self.sweeps, damping=self.damping)
        check_not_negative(shrink=self.shrink, exchanges=self.exchanges)
        if self.zero is not None and self._with_zero not in GRIDS:
            raise SympruneError(f"{self.name} has a level for zero anyway: leave out its zero.")

    @property
    def grid(self) -> Grid:
        return GRIDS[self._with_zero if self.zero else self.name]

    @property
    def _with_zero(self) -> str:
        return f"{self.name}z"

    def settle_zero(self, keeps_all: bool) -> Rounding:
        """The same, with a level for zero if all weights are kept and nobody said otherwise."""
        if self.zero is not None or self._with_zero not in GRIDS:
            return self
        return replace(self, zero=keeps_all)

    @property
    def needs(self) -> str | None:
        """The statistic of a layer's inputs that it makes use of."""
        return None if self.solve == "nearest" else GRAM

    def __call__(
        self,
        weight: Tensor,
        keep: Tensor | None = None,
        fitted: Tensor | None = None,
        stats: ChannelStats | None = None,
    ) -> OnGrid:
        """The dense weights under a mask (None: all stay), on the grid. fitted is what an update
        made of them. Without statistics every weight is rounded by itself."""
        if self.solve == "nearest" or stats is None:
            return round_to_grid(weight if fitted is None else fitted, self.grid, keep)
        if self.solve == "gptq":
            return self._by_gptq(weight.float(), keep, fitted, self._damped(stats, weight))
        found = self._by_descent(weight.float(), keep, fitted, self._damped(stats, weight))
        return OnGrid.from_levels(*found, self.grid, keep)

    def find(
        self,
        weight: Tensor,
        keep: Tensor,
        fitted: Tensor | None,
        stats: ChannelStats,
        pattern: Pattern | None,
    ) -> tuple[Tensor, OnGrid]:
        """Mask and values, from a mask that may change: every row, or every M of a pattern, keeps
        as many as it did."""
        if self.solve != "descent" or self.exchanges == 0:
            return keep, self(weight, keep, fitted, stats)
        gram, weight = self._damped(stats, weight), weight.float()
        found = self._by_descent(weight, keep, fitted, gram)
        among = None if pattern is None else pattern.m
        keep, levels, scales = exchange(weight, keep, gram, self.grid, found, self.exchanges, among)
        return keep, OnGrid.from_levels(levels, scales, self.grid, keep)

    def _damped(self, stats: ChannelStats, weight: Tensor) -> DampedGram:
        gram = stats.gram.to(weight.device)
        return DampedGram.from_gram(gram, self.damping, self.shrink * stats.noise)

    def _by_gptq(
        self, weight: Tensor, keep: Tensor | None, fitted: Tensor | None, gram: DampedGram
    ) -> OnGrid:
        spreading = Spreading.along(gram)
        start = weight if fitted is None else fitted
        levels, scales = gptq(start, _mask(weight, keep), spreading, self.grid)
        bad, finite = host.bring([spreading.failed, torch.isfinite(levels).all()])
        if bad or not finite:
            raise SympruneError("GPTQ's Hessian is not positive definite; raise its damping.")
        return OnGrid.from_levels(levels, scales, self.grid, keep)

    def _by_descent(
        self, weight: Tensor, keep: Tensor | None, fitted: Tensor | None, gram: DampedGram
    ) -> Found:
        """It starts near what fits best off the grid: what an update made or, under a mask alone,
        what is made here."""
        mask = _mask(weight, keep)
        if fitted is None and keep is not None:
            fitted = weight * keep
            gram.descend(weight, fitted, keep, FIT_ITERS)
        start = find_start(weight, weight if fitted is None else fitted, mask, gram, self.grid)
        return descend(weight, mask, gram, self.grid, start, self.sweeps)


class Int8(Rounding):
    """255 levels."""

    name = "int8"


class Int4(Rounding):
    """16 levels."""

    name = "int4"


class Int3(Rounding):
    """8 levels."""

    name = "int3"


class Int2(Rounding):
    """4 levels."""

    name = "int2"


def _mask(weight: Tensor, keep: Tensor | None) -> Tensor:
    return torch.ones_like(weight, dtype=torch.bool) if keep is None else keep
