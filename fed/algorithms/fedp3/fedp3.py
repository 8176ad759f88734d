"""FedP3: every client trains and sends only some layers, and gets the others pruned.

Thesis chapter 4, Algorithms 5-7. Both sides draw a client's own layers once from the seed, so a
reply needs no names: it is the values of these layers, one after the other. A pruned copy never
reaches the average: pruned weights exist only in layers a client does not send. Three points differ
from the print: `weighted` aggregation is normalised over the clients that sent the layer (over all
clients, as printed, layers would shrink), the average runs over the round's participants, and a
layer nobody sent stays. The thesis names an attention aggregation without giving it; here it weighs
updates by how little they moved, or (`learned`) by weights that the server learns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.algorithms.fedp3.layer_subsets import (
    KINDS,
    aggregate,
    aggregation_weights,
    assign_layers,
    by_weight,
    layer_weights,
    local_mask,
    prune_mask,
)
from symprune.fed.algorithms.fedp3.learned_attention import initial_attention, learn_attention
from symprune.fed.algorithms.shared.layer_masks import pack, unpack
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import (
    Algorithm,
    LayeredModel,
    Like,
    Message,
    Received,
    SampledClients,
    Sent,
    State,
    Turn,
    check,
)
from symprune.fed.registry import register


@dataclass(frozen=True)
class OwnLayers(LayeredModel, SampledClients):
    """Which layers are whose; state `owned`, one row of layers per client, on both sides."""

    layers: str = "opu3"

    def prepare(self, constants: Constants) -> Algorithm:
        return self.located(constants.layout)

    def draw_layers(self, turn: Turn) -> State:
        """L_i, drawn once from the seed by server and client alike."""
        return {"owned": assign_layers(self.layers, self.layout, turn.stream("layers"))}

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {"x": x0, **self.draw_layers(turn)}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        return self.draw_layers(turn)

    def own_weights(self, owned: Tensor) -> Tensor:
        """The weights in these layers, `[C, d]` boolean."""
        return by_weight(owned, self.layout)

    def reply(self, owned: Tensor, w: Tensor) -> Message:
        return {"layers": Sent(pack(self.own_weights(owned), w))}

    def unpack_replies(self, owned: Tensor, replies: Received) -> Tensor:
        """The replies as `[C, d]`, zero in the layers that are not the client's."""
        return unpack(self.own_weights(owned), replies["layers"])

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        mine = self.own_weights(server["owned"][turn.clients])
        return {"layers": Like(server["x"].dtype, (int(mine.sum()),))}

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """The share of layers an average client sends."""
        return {"layers_sent": float(server["owned"].double().mean())}


@register
@dataclass(frozen=True)
class FedP3(OwnLayers):
    """Layer subsets per client, the other layers pruned on the way down and never sent back."""

    name = "fedp3"
    paper = "FedP3 (thesis chapter 4), Algorithms 5-7"
    sends = "up: the client's own layers; down: these dense, the others pruned"
    keep: float = 0.9
    prune: str = "random"
    fixed_mask: bool = False
    local_prune: str = "fixed"
    q_min: float = 0.7
    train_unassigned: bool = True
    aggregation: str = "simple"
    temperature: float = 1.0
    attention_lr: float = 0.5
    steps: int = 10
    batch: int = 48
    lr: float = 0.1

    def prepare(self, constants: Constants) -> Algorithm:
        for option, known in KINDS.items():
            value = getattr(self, option)
            check(value in known, f"fedp3: {option} {value!r} is none of {', '.join(known)}.")
        for option, share in (("keep", self.keep), ("q_min", self.q_min)):
            check(0 < share <= 1, f"fedp3: {option} = {share} is outside (0, 1].")
        check(self.steps >= 0 and self.batch > 0, "fedp3: steps and batch must be positive.")
        check(self.temperature > 0, "fedp3: temperature must be positive.")
        check(self.attention_lr >= 0, "fedp3: attention_lr must not be negative.")
        return super().prepare(constants)

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        state = super().server_init(x0, turn)
        if self.aggregation != "learned":
            return state
        return {**state, **initial_attention(turn.n, x0, state["owned"].shape[1])}

    def mask(self, owned: Tensor, turn: Turn, x: Tensor | None = None) -> Tensor:
        """P_i of this round; with `fixed_mask` that of the first."""
        stream = (replace(turn, number=0) if self.fixed_mask else turn).stream("prune")
        return prune_mask(self.prune, self.keep, self.layout, owned, stream, x)

    def broadcast(self, server: State, turn: Turn) -> Message:
        """Values only where both sides know the mask; by magnitude, the mask as well."""
        mask = self.mask(server["owned"][turn.clients], turn, server["x"])
        message: Message = {"values": Sent([server["x"][row] for row in mask])}
        if self.prune == "magnitude":
            message["mask"] = Sent(mask, bits=0, each=True)
        return message

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        owned, mine = client["owned"], self.own_weights(client["owned"])
        mask = received["mask"] if self.prune == "magnitude" else self.mask(owned, turn)
        u = unpack(mask, received["values"])
        batches, ratios, local = (turn.stream(p) for p in ("batch", "ratio", "local"))
        for _ in range(self.steps):
            effective = mask
            if self.local_prune != "fixed":
                q = self.q_min + (1 - self.q_min) * ratios.uniform(1)
                effective = mask & local_mask(self.local_prune, q, self.layout, owned, local)
            g = problem.gradient(u * effective, problem.batch(batches, self.batch))
            u = u - self.lr * g * (effective if self.train_unassigned else mine)
        return client, self.reply(owned, u)

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """Every layer is averaged over the clients that sent it."""
        owned, x = server["owned"][turn.clients], server["x"]
        u = self.unpack_replies(owned, replies)
        if self.aggregation == "learned":
            server = self.learn(server, (u - x) * self.own_weights(owned), owned, turn)
            alpha = layer_weights(server["theta"][turn.clients], owned)
        else:
            kind, temperature = self.aggregation, self.temperature
            alpha = aggregation_weights(kind, owned, u - x, self.layout, temperature)
        return {**server, "x": aggregate(alpha, x, u, owned, self.layout)}

    def learn(self, server: State, update: Tensor, owned: Tensor, turn: Turn) -> State:
        """theta learns from the updates of this round which of the last round's were good; a
        client's own say nothing about it."""
        theta, last, sent = server["theta"], server["last"], server["sent"]
        fall = update.sum(0).repeat(turn.n, 1)
        fall[turn.clients] -= update
        theta = learn_attention(theta, last, sent, fall, self.attention_lr, self.layout)
        last, sent = torch.zeros_like(last), torch.zeros_like(sent)
        last[turn.clients], sent[turn.clients] = update, owned
        return {**server, "theta": theta, "last": last, "sent": sent}
