"""FedDrop (federated dropout): every client trains a random sub-network of its own.

Caldas et al., "Expanding the reach of federated learning by reducing client resource requirements",
a baseline of An Expectation-Maximization Perspective on Federated Learning: the server's optimiser
is that of the other methods there, and nothing is rescaled. Both sides know from the seed which
units are dropped, so only the values of the sub-network travel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.algorithms.fedsparse.em import remember
from symprune.fed.algorithms.fedsparse.fedopt import FedOpt
from symprune.fed.algorithms.fedsparse.sub_networks import draw_units, remaining_weights
from symprune.fed.algorithms.shared.layer_masks import spread, values_on
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import (
    Algorithm,
    Like,
    Message,
    Received,
    Sent,
    State,
    Turn,
    check,
    filled,
)
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class FedDrop(FedOpt):
    """Random sub-networks per client and round, without a share `rate` of the hidden units."""

    name = "feddrop"
    paper = "Caldas et al.: Expanding the reach of federated learning (federated dropout)"
    sends = "up and down: the weights of a random sub-network"
    rate: float = 0.25
    shapes: tuple[tuple[int, ...], ...] = filled(())

    def prepare(self, constants: Constants) -> Algorithm:
        check(0 <= self.rate < 1, f"feddrop: rate = {self.rate} is outside [0, 1).")
        ready = super().prepare(constants)
        return replace(ready, shapes=constants.layout.shapes)  # type: ignore[call-arg]

    def mask(self, turn: Turn) -> Tensor:
        """The weights that the clients of this turn have, `[C, d]`; all keep equally many."""
        units = draw_units(self.shapes, self.rate, turn.stream("drop"))
        mask = remaining_weights(self.shapes, units)
        return mask.expand(len(turn.clients), -1)

    def broadcast(self, server: State, turn: Turn) -> Message:
        mask = self.mask(turn)
        return {"values": Sent(values_on(mask, server["x"].expand_as(mask)), each=True)}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        mask = self.mask(turn)
        w = self.trained(spread(mask, received["values"]), problem, turn, mask)
        return remember(client, w), {"values": values_on(mask, w)}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """The sum of the differences, each on its own sub-network, is the direction."""
        mask = self.mask(turn)
        w = spread(mask, replies["values"])
        return self.stepped(server, torch.where(mask, w - server["x"], 0.0).sum(0))

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        return {"values": Like(server["x"].dtype, (int(self.mask(turn)[0].sum()),))}
