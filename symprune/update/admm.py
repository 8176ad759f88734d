"""ADMM pruning (Boza, 2024), as a baseline: the mask found along the way, or weights under a mask.

Every channel is scaled to norm 1, so that H = G + R has the diagonal 1 + damping. With W the dense
layer and V = W^ + U the weights so far and their scaled multipliers, an iteration is

    V <- W + rho (V K - V (1 - K) - W) (H + rho I)^-1 + V (1 - K)

for a mask K: one product, with an inverse that stays the same. V K tends to the least-squares
weights under K. Where the mask is to be found, the criterion chooses it from V, scaled back, in the
first iterations, with a sparsity that rises as s (1 - (1 - t)^3). Wanda's score of V is its size in
the scaled layer: with `wanda` this is the paper's method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.machine import host
from symprune.masks import Pattern
from symprune.stats import GRAM, ChannelStats
from symprune.update.alternating import MaskOf
from symprune.validation import check_positive


@dataclass(frozen=True)
class ADMM:
    """ADMM pruning with the paper's defaults, as a baseline.

    select: the mask is found in the first `steps` of `iters` iterations; otherwise only the weights
    under the method's mask are updated. damping: in units of each channel's own energy. rho: how
    strongly the weights are drawn to the mask.
    """

    name: ClassVar[str] = "admm"
    needs: ClassVar[str] = GRAM
    select: bool = True
    iters: int = 20
    steps: int = 15
    damping: float = 0.1
    rho: float = 1.0

    def __post_init__(self) -> None:
        check_positive(iters=self.iters, steps=self.steps, damping=self.damping, rho=self.rho)
        if self.select and self.steps > self.iters:
            raise SympruneError(
                f"admm finds its mask in {self.steps} of {self.iters} iterations; lower steps or "
                "raise iters."
            )

    @property
    def finds_mask(self) -> str:
        """As `LeastSquares.finds_mask`."""
        return "admm finds the mask itself unless select is false" if self.select else ""

    def __call__(self, weight: Tensor, keep: Tensor, stats: ChannelStats) -> Tensor:
        """The weights under a mask, updated."""
        fitted, _ = admm(
            weight, stats.gram, lambda *_: keep,
            steps=1, iters=self.iters, damping=self.damping, rho=self.rho,
        )  # fmt: skip
        return fitted

    def find(
        self,
        weight: Tensor,
        stats: ChannelStats,
        mask_of: MaskOf,
        sparsity: float,
        pattern: Pattern | None,
    ) -> tuple[Tensor, Tensor]:
        """Mask and weights, found together; mask_of knows how many stay."""
        fitted, keep = admm(
            weight, stats.gram, mask_of,
            steps=self.steps, iters=self.iters, damping=self.damping, rho=self.rho,
        )  # fmt: skip
        return keep, fitted


def admm(
    weight: Tensor,
    gram: Tensor,
    mask_of: MaskOf,
    *,
    steps: int = 15,
    iters: int = 20,
    damping: float = 0.1,
    rho: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The weights and the mask after `iters` iterations; mask_of is asked in the first `steps`."""
    gram = gram.to(weight.device)
    scale = channel_scale(gram.diagonal())
    dense = weight.float() * scale
    inverse = inverted(scaled(gram, scale), damping + rho)
    values = dense.clone()
    for number in range(1, iters + 1):
        if number <= steps:
            keep = mask_of(values / scale, 1 - (1 - number / steps) ** 3)
        multiplier = values.masked_fill(keep, 0)
        towards = values.sub_(multiplier, alpha=2).sub_(dense)
        values = torch.addmm(multiplier.add_(dense), towards, inverse, alpha=rho)
    fitted = (values / scale) * keep
    check_numbers(fitted)
    return fitted, keep


def channel_scale(diagonal: Tensor) -> Tensor:
    """The norm of every channel; 1 for one that no token reaches, so its weights stay."""
    live = diagonal >= torch.finfo(diagonal.dtype).tiny
    return torch.where(live, diagonal, torch.ones_like(diagonal)).sqrt()


def scaled(gram: Tensor, scale: Tensor) -> Tensor:
    """G of channels that are divided by their scale."""
    return (gram / scale).div_(scale.unsqueeze(1))


def inverted(gram: Tensor, added: float) -> Tensor:
    """(G + added I)^-1, of a G that is not needed any more. It is no number where G + added I is
    not positive definite."""
    gram.diagonal().add_(added)
    factor, failed = torch.linalg.cholesky_ex(gram)
    return torch.cholesky_inverse(factor).masked_fill_(failed > 0, torch.nan)


def check_numbers(fitted: Tensor) -> None:
    """One look, at the end."""
    if not host.bring([host.finite(fitted)])[0]:
        raise SympruneError("ADMM's Hessian is not positive definite; raise its damping.")
