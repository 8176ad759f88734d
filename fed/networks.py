"""Small networks by name, in plain torch; each makes a fresh module for an input shape."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn


def mlp(shape: tuple[int, ...], classes: int, width: int = 64) -> nn.Module:
    """One hidden layer of `width` units with ReLU."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU(), nn.Linear(width, classes)
    )


NETWORKS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp}
