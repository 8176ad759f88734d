"""FedP3: every client trains and sends only some layers, and gets the others pruned.

Thesis chapter 4, Algorithms 5-7. A pruned copy never reaches the average: pruned weights exist only
in layers a client does not send. Three points differ from the print: `weighted` aggregation is
normalised over the clients that sent the layer (over all clients, as printed, layers would shrink),
the average runs over the round's participants, and a layer nobody sent stays. The thesis names an
attention aggregation without giving it; here it weighs updates by how little they moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.layer_masks import spread
from symprune.fed.layer_subsets import (
    Shapes,
    assign,
    by_weight,
    layer_numbers,
    layer_weights,
    local_mask,
    prune_mask,
    read_shapes,
    write_shapes,
)
from symprune.fed.problem import Constants, Problem
from symprune.fed.protocol import (
    Algorithm,
    Like,
    Message,
    Received,
    Sent,
    State,
    Turn,
    check,
    given,
    register,
    sample,
)

PRUNINGS = ("random", "magnitude", "ordered")
LOCAL_PRUNINGS = ("fixed", "uniform", "ordered")
AGGREGATIONS = ("simple", "weighted", "attention")


@register
@dataclass(frozen=True)
class FedP3(Algorithm):
    """Layer subsets per client, the other layers pruned on the way down and never sent back."""

    name = "fedp3"
    paper = "FedP3 (thesis chapter 4), Algorithms 5-7"
    sends = "up: the client's own layers; down: these dense, the others pruned"
    layers: str = "opu3"
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
    cohort_size: int | None = None
    shapes: str | None = None

    def prepare(self, constants: Constants) -> Algorithm:
        for value, known in (
            (self.prune, PRUNINGS),
            (self.local_prune, LOCAL_PRUNINGS),
            (self.aggregation, AGGREGATIONS),
        ):
            check(value in known, f"fedp3: {value!r} is none of {', '.join(known)}.")
        check(0 < self.keep <= 1, f"fedp3: keep = {self.keep} is outside (0, 1].")
        check(0 < self.q_min <= 1, f"fedp3: q_min = {self.q_min} is outside (0, 1].")
        check(self.steps >= 0 and self.batch > 0, "fedp3: steps and batch must be positive.")
        check(self.temperature > 0, "fedp3: temperature must be positive.")
        return replace(self, shapes=write_shapes(constants.layout.shapes))

    @property
    def model_shapes(self) -> Shapes:
        return read_shapes(given(self.shapes))

    def assigned(self, turn: Turn) -> State:
        """L_i, drawn once from the seed by server and client alike."""
        layers = layer_numbers(self.model_shapes)[-1] + 1
        return {"owned": assign(self.layers, layers, turn.stream("layers"))}

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {"x": x0, **self.assigned(turn)}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        return self.assigned(turn)

    def cohort(self, server: State, turn: Turn) -> Tensor:
        return sample(self.cohort_size, turn)

    def mask(self, owned: Tensor, turn: Turn, x: Tensor | None = None) -> Tensor:
        """P_i of this round; with `fixed_mask` that of the first."""
        stream = (replace(turn, number=0) if self.fixed_mask else turn).stream("prune")
        return prune_mask(self.prune, self.keep, self.model_shapes, owned, stream, x)

    def broadcast(self, server: State, turn: Turn) -> Message:
        """Values only where both sides know the mask; by magnitude, the mask as well."""
        x = server["x"]
        mask = self.mask(server["owned"][turn.clients], turn, x)
        message: Message = {"values": Sent([x[row] for row in mask])}
        if self.prune == "magnitude":
            message["mask"] = Sent(mask, bits=0, each=True)
        return message

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        owned = client["owned"]
        mask = received["mask"] if self.prune == "magnitude" else self.mask(owned, turn)
        u = spread(mask, torch.cat([v.flatten() for v in received["values"]]))
        mine = by_weight(owned, self.model_shapes)
        batches, ratios = turn.stream("batch"), turn.stream("ratio")
        local = turn.stream("local")
        for _ in range(self.steps):
            effective = mask
            if self.local_prune != "fixed":
                q = self.q_min + (1 - self.q_min) * ratios.uniform(1)
                effective = mask & local_mask(self.local_prune, q, self.model_shapes, owned, local)
            g = problem.gradient(u * effective, problem.batch(batches, self.batch))
            u = u - self.lr * g * (effective if self.train_unassigned else mine)
        return client, {"layers": Sent([row[own] for row, own in zip(u, mine, strict=True)])}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """`W^l <- sum_i alpha_i^l U_i^l` over the clients that sent layer l."""
        owned, x = server["owned"][turn.clients], server["x"]
        mine = by_weight(owned, self.model_shapes)
        u = spread(mine, torch.cat([v.flatten() for v in replies["layers"]]))
        alpha = by_weight(self.weights(u - x, owned), self.model_shapes).to(x.dtype)
        mean = (alpha * u).sum(0)
        return {**server, "x": torch.where(mine.any(0), mean, x)}

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        mine = by_weight(server["owned"][turn.clients], self.model_shapes)
        return {"layers": Like(server["x"].dtype, (int(mine.sum()),))}

    def weights(self, update: Tensor, owned: Tensor) -> Tensor:
        """alpha `[C, layers]`: equal (simple), by the number of layers a client trains (weighted),
        or by `-||U_i^l - W^l|| / temperature` (attention)."""
        theta = torch.zeros(owned.shape, dtype=torch.float64)
        if self.aggregation == "weighted":
            theta = theta + owned.sum(1, keepdim=True).double().log()
        elif self.aggregation == "attention":
            squares = torch.zeros_like(theta)
            parts = update.double().split([math.prod(shape) for shape in self.model_shapes], 1)
            for number, part in zip(layer_numbers(self.model_shapes), parts, strict=True):
                squares[:, number] += part.square().sum(1)
            theta = -squares.sqrt() / self.temperature
        return layer_weights(theta, owned)

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """The share of layers an average client sends."""
        return {"layers_sent": float(server["owned"].double().mean())}
