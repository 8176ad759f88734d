"""What an accelerator has found out, as numbers of the host.

The host gives an accelerator its work and goes on; only when it wants to know a result it waits
until all work so far is done. So results are asked for together, and inside loops seldom: a step
that turns out to have been the last but one costs less than a wait after each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOOK_EVERY = 8


def bring(values: Sequence[Tensor]) -> list[float]:
    """The values of 0-dimensional tensors, with one wait for each device they are on."""
    found: dict[int, float] = {}
    for device in dict.fromkeys(value.device for value in values):
        numbers = [number for number, value in enumerate(values) if value.device == device]
        together = torch.stack([values[number].double() for number in numbers])
        found |= dict(zip(numbers, together.tolist(), strict=True))
    return [found[number] for number in range(len(values))]


def finite(values: Tensor) -> Tensor:
    """Whether all are numbers, none of them infinite."""
    if values.device.type == "cpu":
        # A sum is quicker than a look at every entry, and enough as long as it is a number itself.
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        total = torch.isfinite(values.sum(dtype=wide))
        if total:
            return total
    return torch.isfinite(values).all()


def steps_between_looks(device: torch.device) -> int:
    """How many steps of a loop to take before looking whether it is done."""
    return 1 if device.type == "cpu" else LOOK_EVERY


def first_true(mask: Tensor, count: int) -> Tensor:
    """Where the first `count` True of a vector are, for a caller that knows there are so many."""
    if mask.device.type == "cpu":
        return mask.nonzero().squeeze(1)[:count]
    return mask.to(torch.uint8).argsort(descending=True, stable=True)[:count]
