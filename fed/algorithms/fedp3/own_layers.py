"""Layers that belong to a client: the only ones of the model that it ever sends.

FedP3, thesis chapter 4. Both sides draw them once from the seed, so a reply needs no names: it is
the values of the client's own layers, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from symprune.fed.algorithms.fedp3.layer_subsets import assign_layers, by_weight
from symprune.fed.algorithms.shared.layer_masks import pack, unpack
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import (
    Algorithm,
    Like,
    Message,
    Received,
    SampledClients,
    Sent,
    State,
    Turn,
    filled,
)


@dataclass(frozen=True)
class OwnLayers(SampledClients):
    """Which layers are whose; state `owned`, one row of layers per client, on both sides."""

    layers: str = "opu3"
    shapes: tuple[tuple[int, ...], ...] = filled(())

    def prepare(self, constants: Constants) -> Algorithm:
        return replace(self, shapes=constants.layout.shapes)

    def assigned(self, turn: Turn) -> State:
        """L_i, drawn once from the seed by server and client alike."""
        return {"owned": assign_layers(self.layers, self.shapes, turn.stream("layers"))}

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {"x": x0, **self.assigned(turn)}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        return self.assigned(turn)

    def own_weights(self, owned: Tensor) -> Tensor:
        """The weights in these layers, `[C, d]` boolean."""
        return by_weight(owned, self.shapes)

    def reply(self, owned: Tensor, w: Tensor) -> Message:
        return {"layers": Sent(pack(self.own_weights(owned), w))}

    def replied(self, owned: Tensor, replies: Received) -> Tensor:
        """The replies as `[C, d]`, zero in the layers that are not the client's."""
        return unpack(self.own_weights(owned), replies["layers"])

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        mine = self.own_weights(server["owned"][turn.clients])
        return {"layers": Like(server["x"].dtype, (int(mine.sum()),))}

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """The share of layers an average client sends."""
        return {"layers_sent": float(server["owned"].double().mean())}
