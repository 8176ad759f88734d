"""Gates of the spike-and-slab prior: probability from magnitude, hard-concrete relaxation, and the
gradients that clients and server need.

An Expectation-Maximization Perspective on Federated Learning (FedSparse), sections 3 and 3.2. A
group's gate is open with probability `sigmoid((||w_g|| - softplus(v_g)) / T)`. Logits are in the
hundreds, so nothing here takes the logarithm of a probability.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from symprune.fed.problems.losses import sigmoid, softplus

# Constants of the hard concrete distribution (Louizos et al.: L0 regularisation).
BETA, LOW, HIGH = 2 / 3, -0.1, 1.1
SHIFT = -BETA * math.log(-LOW / HIGH)  # P(z > 0) = sigmoid(log_alpha + SHIFT)


def gate_logit(norm: Tensor, v: Tensor, temperature: float) -> Tensor:
    """`(||w_g|| - softplus(v_g)) / T`; no gradient flows from the gate to the weights."""
    return (norm - softplus(v)) / temperature


def initial_threshold(norm: Tensor, temperature: float, theta: float) -> Tensor:
    """`v` for which the gates are open with probability theta. A group whose norm is below
    `T logit(theta)` cannot get there; its threshold is 1e-6."""
    tau = (norm.double() - temperature * math.log(theta / (1 - theta))).clamp_min(1e-6)
    return torch.log(torch.expm1(tau)).to(norm.dtype)


def hard_concrete(log_alpha: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A relaxed gate in [0, 1] from uniform u, and its derivative in log_alpha."""
    noise = (torch.log1p(u - 1) - torch.log1p(-u)).to(log_alpha.dtype)
    s = sigmoid((noise + log_alpha) / BETA)
    stretched = s * (HIGH - LOW) + LOW
    inside = (stretched > 0) & (stretched < 1)
    return stretched.clamp(0, 1), inside * (s * (1 - s) * ((HIGH - LOW) / BETA))


def open_chance(log_alpha: Tensor) -> Tensor:
    """`P(z > 0)` of the hard concrete gate, which stands for pi in the penalties."""
    return sigmoid(log_alpha + SHIFT)


def penalty_slope(
    log_alpha: Tensor,
    prior_logit: Tensor,
    sizes: Tensor,
    drift: Tensor,
    l0: float,
    cross_entropy: float,
) -> Tensor:
    """Derivative in log_alpha of `R (drift + l0 n_g - c logit_g)`, R the chance to be open: what
    is paid for drifting from the server, for the weights kept, for leaving the prior."""
    chance = open_chance(log_alpha)
    return chance * (1 - chance) * (drift + l0 * sizes - cross_entropy * prior_logit)


def threshold_slope(v: Tensor, temperature: float) -> Tensor:
    """`d logit / d v = -sigmoid(v) / T`."""
    return -sigmoid(v) / temperature


def server_directions(
    z: Tensor, w_s: Tensor, w: Tensor, z_weights: Tensor, logit: Tensor, v: Tensor, T: float
) -> tuple[Tensor, Tensor]:
    """Directions of ascent of `sum_s log Bern(z_s | theta) - 1/2 sum_s z_s ||w_s - w||^2` for w
    and v. The paper prints `z (1 - theta) - (1 - z) theta`, which is `z - theta`."""
    for_weights = (z_weights * (w_s - w)).sum(0)
    for_thresholds = (z - sigmoid(logit)).sum(0) * threshold_slope(v, T)
    return for_weights, for_thresholds
