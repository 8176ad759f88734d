"""ALPS (Meng et al., 2024), as a baseline: a support found by ADMM, then fitted weights on it.

The iteration is that of `admm`, with two differences: the criterion takes the whole share from the
start, and rho rises, so that the mask comes to rest. Every three iterations the weights that came
or went since the last look are counted: rho grows by a factor of 1.3 if they are a tenth of those
that stay, 1.2 if 5 in a thousand, otherwise 1.1. When hardly any did, the mask is done and a few
conjugate gradient steps fit the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from symprune.machine import host
from symprune.masks import Pattern, count_true
from symprune.stats import GRAM, ChannelStats
from symprune.update.admm import channel_scale, check_numbers, inverted, scaled
from symprune.update.alternating import MaskOf
from symprune.update.damped_gram import DampedGram
from symprune.validation import check_positive

LOOK_EVERY = 3  # iterations, as published
SETTLED, NOT_BEFORE = 3e-4, 30  # the share that still changes, and from which iteration it counts
FACTORS = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))  # from this share on: what rho is multiplied by


@dataclass(frozen=True)
class ALPS:
    """ALPS with the paper's defaults, as a baseline.

    select: the mask is searched; otherwise only the weights under the method's mask are fitted.
    iters: conjugate gradient steps at the end. search_iters: of the search, at most. damping: in
    units of G's mean diagonal. rho: where the search begins.
    """

    name: ClassVar[str] = "alps"
    needs: ClassVar[str] = GRAM
    select: bool = True
    iters: int = 10
    search_iters: int = 300
    damping: float = 0.01
    rho: float = 0.1

    def __post_init__(self) -> None:
        check_positive(iters=self.iters, search_iters=self.search_iters)
        check_positive(damping=self.damping, rho=self.rho)

    @property
    def finds_mask(self) -> str:
        """As `LeastSquares.finds_mask`."""
        return "alps finds the mask itself unless select is false" if self.select else ""

    def __call__(self, weight: Tensor, keep: Tensor, stats: ChannelStats) -> Tensor:
        """The weights under a mask, fitted."""
        damped_gram = DampedGram.from_gram(stats.gram.to(weight.device), self.damping, 0.0)
        fitted = weight.float() * keep
        damped_gram.descend(weight.float(), fitted, keep, self.iters)
        return fitted

    def find(
        self,
        weight: Tensor,
        stats: ChannelStats,
        mask_of: MaskOf,
        sparsity: float,
        pattern: Pattern | None,
    ) -> tuple[Tensor, Tensor]:
        """Mask and weights; mask_of knows how many stay."""
        damped_gram = DampedGram.from_gram(stats.gram.to(weight.device), self.damping, 0.0)
        fitted, keep = search(weight, damped_gram, mask_of, iters=self.search_iters, rho=self.rho)
        damped_gram.descend(weight.float(), fitted, keep, self.iters)
        return keep, fitted


def search(
    weight: Tensor, damped_gram: DampedGram, mask_of: MaskOf, *, iters: int = 300, rho: float = 0.1
) -> tuple[Tensor, Tensor]:
    """The weights and the mask that ADMM comes to rest at, with a rising rho."""
    scale = channel_scale(damped_gram.diagonal)
    dense = weight.float() * scale
    hessian = scaled(damped_gram.square(slice(None)), scale)
    inverse = inverted(hessian.clone(), rho)
    keep = last = mask_of(weight.float(), 1.0)
    values, multiplier = dense * keep, torch.zeros_like(dense)
    for number in range(1, iters + 1):
        towards = values.sub_(multiplier).sub_(dense)
        values = torch.addmm(multiplier.add_(dense), towards, inverse, alpha=rho)
        keep = mask_of(values / scale, 1.0)
        multiplier = values.masked_fill(keep, 0)
        values *= keep
        if number % LOOK_EVERY:
            continue
        changed, kept = (count_true(each.flatten()) for each in (keep ^ last, keep))
        share = host.bring([changed / kept.clamp(min=1)])[0]
        if share == 0 or (number > NOT_BEFORE and share < SETTLED):
            break
        factor = next(factor for least, factor in FACTORS if share >= least)
        last, rho, multiplier = keep, rho * factor, multiplier.div_(factor)
        inverse = inverted(hessian.clone(), rho)
    fitted = values / scale
    check_numbers(fitted)
    return fitted, keep
