"""FedDrop (federated dropout): every client trains a random sub-network of its own.

Caldas et al., "Expanding the reach of federated learning by reducing client resource requirements",
a baseline of An Expectation-Maximization Perspective on Federated Learning: the server's optimiser
is that of the other methods there, and nothing is rescaled. Both sides know from the seed which
units are dropped, so only the values of the sub-network travel. Layers must follow each other: the
unit of one is an input (or, after flattening, a block of inputs) of the next, so both its incoming
and its outgoing weights go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.algorithms.fedsparse.em import remember
from symprune.fed.algorithms.fedsparse.fedopt import FedOpt
from symprune.fed.algorithms.shared.layer_masks import pack, unpack
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import (
    Algorithm,
    LayeredModel,
    Like,
    Message,
    Received,
    Sent,
    State,
    Turn,
    check,
)
from symprune.fed.randomness import Stream
from symprune.fed.registry import register
from symprune.masks import keep_largest

Shapes = tuple[tuple[int, ...], ...]


@register
@dataclass(frozen=True)
class FedDrop(LayeredModel, FedOpt):
    """Random sub-networks per client and round, without a share `rate` of the hidden units."""

    name = "feddrop"
    paper = "Caldas et al.: Expanding the reach of federated learning (federated dropout)"
    sends = "up and down: the weights of a random sub-network"
    averages = False
    rate: float = 0.25

    def prepare(self, constants: Constants) -> Algorithm:
        check(0 <= self.rate < 1, f"feddrop: rate = {self.rate} is outside [0, 1).")
        return super().prepare(constants).located(constants.layout)

    def mask(self, turn: Turn) -> Tensor:
        """The weights that the clients of this turn have, `[C, d]`; all keep equally many, unless
        masks leave more of one unit than of another."""
        units = draw_units(self.layout.shapes, self.rate, turn.stream("drop"))
        mask = self.layout.gather(remaining_weights(self.layout.shapes, units))
        return mask.expand(len(turn.clients), -1)

    def broadcast(self, server: State, turn: Turn) -> Message:
        mask = self.mask(turn)
        return {"values": Sent([server["x"][row] for row in mask])}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        mask = self.mask(turn)
        w = self.train_locally(unpack(mask, received["values"]), problem, turn, mask)
        return remember(client, w), {"values": Sent(pack(mask, w))}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """The sum of the differences, each on its own sub-network, is the direction."""
        mask = self.mask(turn)
        w = unpack(mask, replies["values"])
        return self.step_server(server, torch.where(mask, w - server["x"], 0.0).sum(0))

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        return {"values": Like(server["x"].dtype, (int(self.mask(turn)[0].sum()),))}


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
