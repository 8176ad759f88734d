"""Every coordinate is sent by exactly one client: the aggregation sketch of FedP3's theory.

Thesis chapter 4, Algorithms 10 and 11. In each step a random permutation, which server and clients
know without sending it, shares the d coordinates out among the n clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.algorithms.shared.layer_masks import pack, unpack
from symprune.fed.protocol import Algorithm, Like, Message, Received, Sent, State, Turn


@dataclass(frozen=True)
class PermutationUpload(Algorithm):
    """Who sends which coordinates, and what the server does with them. `sketch=False` sends
    everything and averages, at n times the bytes."""

    gamma: float | None = None
    iterations: int = 1000
    sketch: bool = True

    def own_coordinates(self, d: int, turn: Turn) -> Tensor:
        """The coordinates of each client, `[C, d]` boolean: every one has exactly one owner."""
        if not self.sketch:
            return torch.ones(len(turn.clients), d, dtype=torch.bool)
        place = turn.shared("permutation").permutation(d)[0].argsort()
        return place // -(-d // turn.n) == turn.clients.unsqueeze(1)

    def reply(self, u: Tensor, turn: Turn) -> Message:
        chosen = self.own_coordinates(u.shape[1], turn)
        return {"u": Sent(pack(chosen, u))}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """`w <- (1/n) sum_i S_i u_i`: each coordinate is its owner's; it stays without a reply."""
        chosen = self.own_coordinates(len(server["x"]), turn)
        u = unpack(chosen, replies["u"])
        if not self.sketch:
            return {"x": u.mean(0)}
        return {"x": torch.where(chosen.any(0), u.sum(0), server["x"])}

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        chosen = self.own_coordinates(len(server["x"]), turn)
        return {"u": Like(server["x"].dtype, (int(chosen.sum()),))}
