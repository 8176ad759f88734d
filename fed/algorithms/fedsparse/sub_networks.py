"""Networks with some of their hidden units left out: which weights remain.

For models whose layers follow each other. The unit of one layer is an input (or, after flattening,
a block of inputs) of the next, so both its incoming and its outgoing weights go.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.randomness import Stream
from symprune.masks import keep_largest

Shapes = tuple[tuple[int, ...], ...]


def hidden_units(shapes: Shapes) -> list[int]:
    """The number of units of every layer but the last."""
    return [shape[0] for shape in shapes if len(shape) > 1][:-1]


def draw_units(shapes: Shapes, rate: float, stream: Stream) -> list[Tensor]:
    """For every hidden layer, `round((1 - rate) units)` of its units at random, `[C, units]`."""
    return [
        keep_largest(stream.uniform(units), max(1, round((1 - rate) * units)))
        for units in hidden_units(shapes)
    ]


def remaining_weights(shapes: Shapes, units: list[Tensor]) -> Tensor:
    """The weights of the sub-network that has these units, `[C, d]` boolean."""
    count = len(units[0]) if units else 1
    everything = torch.ones(count, 1, dtype=torch.bool)
    parts: list[Tensor] = []
    layer, outputs = -1, None
    for shape in shapes:
        if len(shape) < 2:  # biases and normalisation go with the units before them
            if outputs is None or outputs.shape[1] != shape[0]:
                parts.append(everything.expand(-1, shape[0]))
            else:
                parts.append(outputs)
            continue
        columns = _columns(shape, outputs, count)
        layer += 1
        outputs = units[layer] if layer < len(units) else everything.expand(-1, shape[0])
        parts.append((outputs.unsqueeze(2) & columns).flatten(1))
    return torch.cat(parts, 1)


def _columns(shape: tuple[int, ...], inputs: Tensor | None, count: int) -> Tensor:
    """Which entries of a row of this weight remain, `[C, 1, columns]`."""
    columns = math.prod(shape[1:])
    if inputs is None:
        return torch.ones(count, 1, columns, dtype=torch.bool)
    if columns % inputs.shape[1]:
        raise SympruneError(
            f"A layer of {inputs.shape[1]} units is not followed by one with as many inputs "
            f"({columns}); sub-networks need layers that follow each other."
        )
    return inputs.repeat_interleave(columns // inputs.shape[1], 1).unsqueeze(1)
