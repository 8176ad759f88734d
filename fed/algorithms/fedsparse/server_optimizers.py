"""Server-side steps along a direction of ascent: plain, Adam and Adamax, with explicit state.

Kingma and Ba: Adam. In generalised FedAvg (Reddi et al.) the direction is the sum of the clients'
differences; a plain step of one over their number is then their mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.errors import SympruneError

State = dict[str, Tensor]
OPTIMIZERS = ("sgd", "adam", "adamax")
MEAN, SIZE, TINY = 0.9, 0.999, 1e-8


def moments(x: Tensor, name: str) -> State:
    """The state of an optimiser that has not stepped yet."""
    zero = torch.zeros_like(x)
    return {f"{name}.mean": zero, f"{name}.size": zero, f"{name}.count": torch.tensor(0)}


def ascend(
    kind: str, x: Tensor, direction: Tensor, state: State, name: str, rate: float
) -> tuple[Tensor, State]:
    """`x` after one step along `direction`, and the optimiser's new state."""
    if kind not in OPTIMIZERS:
        raise SympruneError(f"Unknown optimiser {kind!r}; choose from {', '.join(OPTIMIZERS)}.")
    count = state[f"{name}.count"] + 1
    if kind == "sgd":
        unused = {f"{name}.mean": state[f"{name}.mean"], f"{name}.size": state[f"{name}.size"]}
        return x + rate * direction, {**unused, f"{name}.count": count}
    mean = MEAN * state[f"{name}.mean"] + (1 - MEAN) * direction
    correction = 1 - MEAN ** int(count)
    if kind == "adam":
        size = SIZE * state[f"{name}.size"] + (1 - SIZE) * direction.square()
        scale = (size / (1 - SIZE ** int(count))).sqrt() + TINY
    else:
        size = torch.maximum(SIZE * state[f"{name}.size"], direction.abs() + TINY)
        scale = size
    x = x + (rate / correction) * mean / scale
    return x, {f"{name}.mean": mean, f"{name}.size": size, f"{name}.count": count}
