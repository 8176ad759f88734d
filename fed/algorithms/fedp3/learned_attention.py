"""FedP3's attention learned at the server (thesis chapter 4, Algorithm 7, which names it only).

`alpha_i^l = softmax(theta_i^l)` over the senders of layer l. The gradient of the loss in theta_i^l
is `alpha_i^l <grad^l, U_i^l - mean^l>`, and where the loss falls from the new model on is what the
clients of the next round show with their updates. So the server needs no rows: it keeps theta, a
number per client and layer, and what the last cohort sent, until the next has replied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.fed.algorithms.fedp3.layer_subsets import by_weight, layer_numbers, layer_weights
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.protocol import State


def initial_attention(clients: int, x0: Tensor, layers: int) -> State:
    """theta = 0, which is the simple mean, and nothing sent yet."""
    return {
        "theta": torch.zeros(clients, layers, dtype=torch.float64),
        "last": torch.zeros(clients, *x0.shape, dtype=x0.dtype),
        "sent": torch.zeros(clients, layers, dtype=torch.bool),
    }


def learn_attention(
    theta: Tensor, last: Tensor, sent: Tensor, fall: Tensor, rate: float, layout: FlatLayout
) -> Tensor:
    """theta `[n, layers]` after a step of length `rate` against the gradient's direction.

    last: updates `[n, d]` of the cohort that made today's model, zero elsewhere; sent: whose layers
    they are; fall: the direction `[n, d]` in which the loss of the others falls from today's model
    on. A client's step is the cosine between it and how its update differs from the mean, layer by
    layer."""
    mean = (by_weight(layer_weights(theta, sent), layout).to(last.dtype) * last).sum(0)
    away = (last - mean) * by_weight(sent, layout)
    along = layer_sums(away * fall, layout)
    lengths = layer_sums(away.square(), layout) * layer_sums(fall.square(), layout)
    cosine = along / lengths.sqrt().clamp_min(1e-30)
    return theta + rate * torch.where(sent, cosine, torch.zeros_like(cosine))


def layer_sums(values: Tensor, layout: FlatLayout) -> Tensor:
    """`[C, d]` -> `[C, layers]` in double precision."""
    numbers = layer_numbers(layout.shapes)
    sums = torch.zeros(len(values), numbers[-1] + 1, dtype=torch.float64)
    for number, part in zip(numbers, values.double().split(layout.sizes, 1), strict=True):
        sums[:, number] += part.sum(1)
    return sums
