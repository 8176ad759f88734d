"""Mask and kept weights found in turn: score, mask, re-fit, with the sparsity rising to its target.

A mask made once is made for the dense weights, while the weights that stay will be re-fitted. Here
every round scores what each weight would be worth now. With W the dense layer, V the weights so far
and H = G + R (`DampedGram`), one preconditioned gradient step

    Z = V + (W - V) H / diag(H)

gives back to a removed weight the value that would serve best, and leaves a fitted one where it is.
The criterion scores Z, the mask keeps the best, a few conjugate gradient steps re-fit what stays.
(W - V) H is at hand after a round's steps, which keep it up to date; its first value costs the one
product with G that a round takes more than its steps.
The sparsity rises as s (1 - (1 - t)^3), the cubic schedule of gradual pruning (Zhu and Gupta, 2017)
that ADMM pruning of language models uses as well (Boza, 2024).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from symprune.scores import inverse
from symprune.update.damped_gram import DampedGram, Room

MaskOf = Callable[[Tensor, float], Tensor]
"""mask_of(values, share): the keep-mask when that share of what has to go is removed."""


def alternate(
    weight: Tensor,
    gram: Tensor,
    mask_of: MaskOf,
    *,
    rounds: int,
    iters: int = 4,
    last_iters: int = 4,
    damping: float = 0.01,
    shrink: float = 0.0,
    tolerance: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The weights and the mask after `rounds` rounds of `iters` conjugate gradient steps each, the
    last one of `last_iters`, or fewer when `tolerance` of its first residual is reached."""
    weight = weight.float()
    damped_gram = DampedGram.from_gram(gram.to(weight.device), damping, shrink)
    towards = inverse(damped_gram.diagonal)
    fitted, pull, room = weight.clone(), torch.zeros_like(weight), Room.for_rows_of(weight)
    for number in range(1, rounds + 1):
        keep = mask_of(pull.mul_(towards).add_(fitted), 1 - (1 - number / rounds) ** 3)
        steps = (iters, 0.0) if number < rounds else (last_iters, tolerance)
        pull = damped_gram.descend(weight, fitted, keep, *steps, room)
    return fitted, keep
