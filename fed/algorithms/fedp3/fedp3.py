"""FedP3: every client trains and sends only some layers, and gets the others pruned.

Thesis chapter 4, Algorithms 5-7. A pruned copy never reaches the average: pruned weights exist only
in layers a client does not send. Three points differ from the print: `weighted` aggregation is
normalised over the clients that sent the layer (over all clients, as printed, layers would shrink),
the average runs over the round's participants, and a layer nobody sent stays. The thesis names an
attention aggregation without giving it; here it weighs updates by how little they moved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from symprune.fed.algorithms.fedp3.layer_subsets import KINDS, aggregate, local_mask, prune_mask
from symprune.fed.algorithms.fedp3.own_layers import OwnLayers
from symprune.fed.algorithms.shared.layer_masks import unpack
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Message, Received, Sent, State, Turn, check
from symprune.fed.registry import register


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
        return super().prepare(constants)

    def mask(self, owned: Tensor, turn: Turn, x: Tensor | None = None) -> Tensor:
        """P_i of this round; with `fixed_mask` that of the first."""
        stream = (replace(turn, number=0) if self.fixed_mask else turn).stream("prune")
        return prune_mask(self.prune, self.keep, self.shapes, owned, stream, x)

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
                effective = mask & local_mask(self.local_prune, q, self.shapes, owned, local)
            g = problem.gradient(u * effective, problem.batch(batches, self.batch))
            u = u - self.lr * g * (effective if self.train_unassigned else mine)
        return client, self.reply(owned, u)

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """Every layer is averaged over the clients that sent it."""
        owned, x = server["owned"][turn.clients], server["x"]
        u = self.replied(owned, replies)
        x = aggregate(self.aggregation, x, u, owned, self.shapes, self.temperature)
        return {**server, "x": x}
