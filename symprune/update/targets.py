"""What the weights of a layer are fitted to: its own outputs, or those the dense model has there.

Behind pruned blocks a layer is given X~ where the dense model gives it X. Fitted to its own outputs
X~ W^T it repeats what was lost before it. The weights that come closest to the dense model's X W^T,

    W* = W + a W D (G + R)^-1    with  D = (X - X~)^T X~  and  G = X~^T X~,

make up for it (a = 1), or for a part of it, as what is lost on few tokens need not be lost on
others. (QEP, "Quantization Error Propagation", NeurIPS 2025; GPTAQ, ICML 2025.) `DampedGram` has R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.machine import host
from symprune.stats import SHRINK, ChannelStats
from symprune.update.damped_gram import DampedGram

OWN = "own"
SHARES: dict[str, tuple[float, ...]] = {"own": (), "mixed": (0.25, 0.5), "dense": (1.0,)}
"""The shares a that held-out tokens may choose from, besides 0."""
TARGETS = tuple(SHARES)
TOKENS_A_CHANNEL = 10  # below, what was lost cannot be told from chance
DAMPING = 0.01


def aim(
    weight: Tensor, stats: ChannelStats, held_out: ChannelStats, targets: str
) -> tuple[Tensor, float]:
    """The weights to fit and their share a: the one with the least error against the dense model's
    outputs on held-out tokens; `weight` itself and 0 where none lowers it."""
    change = correction(weight, stats)
    if change is None:
        return weight, 0.0
    gram, drift = (each.to(change.device) for each in (held_out.gram, held_out.drift))
    gained = ((weight.float() @ drift) * change).sum(dtype=torch.float64)
    spent = ((change @ gram) * change).sum(dtype=torch.float64)
    gain, cost = host.bring([gained, spent])
    # ||X W^T - X~ (W + a C)^T||^2 differs by a^2 <C G, C> - 2 a <W D, C> from that of W.
    risen = {share: share**2 * cost - 2 * share * gain for share in SHARES[targets]}
    share = min(risen, key=lambda each: risen[each])
    if not risen[share] < 0:
        return weight, 0.0
    return weight.float().add(change, alpha=share), share


def correction(weight: Tensor, stats: ChannelStats) -> Tensor | None:
    """W D (G + R)^-1, fp32; None where G + R cannot be inverted."""
    weight = weight.float()
    gram = DampedGram.from_gram(stats.gram.to(weight.device), DAMPING, SHRINK * stats.noise)
    factor, failed = torch.linalg.cholesky_ex(gram.gram + gram.added.diag())
    change = torch.cholesky_solve((weight @ stats.drift.to(weight.device)).T, factor).T
    bad, finite = host.bring([failed, torch.isfinite(change).all()])
    return change if finite and not bad else None
