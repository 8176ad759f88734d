"""SparseGPT (Frantar and Alistarh, 2023), as a baseline: mask + statistics -> updated weights.

It minimises ||X(W~ - W)||_F over the kept weights with G = X^T X; the pruned ones stay zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.machine import host
from symprune.masks import Pattern, count_removed, drop_ordered, highest_of_groups
from symprune.stats import GRAM, ChannelStats
from symprune.update.alternating import MaskOf
from symprune.validation import check_positive


@dataclass(frozen=True)
class SparseGPT:
    """SparseGPT with the paper's defaults, as a baseline.

    select: the mask is chosen as the paper does, while the weights are updated, and the recipe's
    method has no say; otherwise only the weights under the method's mask are updated.
    """

    name: ClassVar[str] = "sparsegpt"
    needs: ClassVar[str] = GRAM
    select: bool = True
    damping: float = 0.01
    block: int = 128

    def __post_init__(self) -> None:
        check_positive(damping=self.damping, block=self.block)

    @property
    def finds_mask(self) -> str:
        """As `LeastSquares.finds_mask`."""
        return "sparsegpt finds the mask itself unless select is false" if self.select else ""

    def __call__(self, weight: Tensor, keep: Tensor, stats: ChannelStats) -> Tensor:
        """The weights under a mask, updated."""
        fitted, _ = sparsegpt(weight, keep, stats.gram, damping=self.damping, block=self.block)
        return fitted

    def find(
        self,
        weight: Tensor,
        stats: ChannelStats,
        mask_of: MaskOf,
        sparsity: float,
        pattern: Pattern | None,
    ) -> tuple[Tensor, Tensor]:
        """Mask and weights, as the paper does; the recipe's method, mask_of, has no say."""
        fitted, keep = sparsegpt(
            weight,
            None,
            stats.gram,
            sparsity=sparsity,
            pattern=pattern,
            damping=self.damping,
            block=self.block,
        )
        return keep, fitted


def sparsegpt(
    weight: Tensor,
    keep: Tensor | None,
    gram: Tensor,
    *,
    sparsity: float = 0.5,
    pattern: Pattern | None = None,
    damping: float = 0.01,
    block: int = 128,
) -> tuple[Tensor, Tensor]:
    """SparseGPT (Frantar and Alistarh, 2023): column by column, each removed weight's error is
    spread over the columns to its right through the inverse Hessian. Returns the weights and the
    mask.

    keep=None selects as the paper does: in blocks of `block` columns by w^2 / [H^-1]_jj^2, N:M
    inside every group, of which a block then holds whole ones. With a mask only the weights are
    updated.
    """
    if pattern is not None:
        block = -(-block // pattern.m) * pattern.m
    weight = weight.float().clone()
    gram = gram.to(weight.device).clone()
    columns = weight.shape[1]
    dead = gram.diagonal() == 0
    gram.diagonal().masked_fill_(dead, 1)
    weight.masked_fill_(dead, 0)
    gram.diagonal().add_(damping * gram.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(gram)
    inverted, not_inverted = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
    chosen = torch.ones_like(weight, dtype=torch.bool) if keep is None else keep.clone()
    for start in range(0, columns, block):
        end = min(start + block, columns)
        local, upper = weight[:, start:end].clone(), inverted[start:end, start:end]
        if keep is None and pattern is None:
            saliency = local**2 / upper.diagonal() ** 2
            dropped = count_removed(saliency.numel(), sparsity)
            chosen[:, start:end] = drop_ordered(saliency.flatten(), dropped).view(saliency.shape)
        errors = torch.zeros_like(local)
        for j in range(end - start):
            if keep is None and pattern is not None and (start + j) % pattern.m == 0:
                group = slice(j, j + pattern.m)
                saliency = local[:, group] ** 2 / upper.diagonal()[group] ** 2
                chosen[:, start + j : start + j + pattern.m] = highest_of_groups(saliency, pattern)
            kept = local[:, j] * chosen[:, start + j]
            errors[:, j] = (local[:, j] - kept) / upper[j, j]
            local[:, j:] -= errors[:, j : j + 1] * upper[j, j:]
            local[:, j] = kept
        weight[:, start:end] = local
        weight[:, end:] -= errors @ inverted[start:end, end:]
    # One look at the end, not one at every block: what comes of a bad Hessian is let go.
    bad, finite = host.bring([failed + not_inverted, torch.isfinite(weight).all()])
    if bad:
        raise SympruneError("SparseGPT's Hessian is not positive definite; raise its damping.")
    if not finite:
        raise SympruneError("SparseGPT's weights grow beyond all numbers; raise its damping.")
    return weight * chosen, chosen
