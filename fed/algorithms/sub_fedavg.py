"""Sub-FedAvg: clients start dense and prune their own model a little at a time.

Vahidian et al., "Personalized federated learning by structured and unstructured pruning under data
heterogeneity", the unstructured version, as FedSpa's comparison runs it: a client that is accurate
enough and whose candidate mask still moved during the round prunes 5 % of what is left, per layer,
until the target density; a weight is averaged over the clients that kept it. Any criterion of the
pruning engine may choose what goes (`mask_score`); the paper's is magnitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune import scores
from symprune.fed.layer_masks import layer_ones, spread
from symprune.fed.local_epochs import LocalEpochs, train
from symprune.fed.mask_scores import calibration_rows, weight_scores
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
)
from symprune.masks import drop_lowest


@register
@dataclass(frozen=True)
class SubFedAvg(LocalEpochs):
    """Personal masks that shrink from dense to a target, each weight averaged by its keepers."""

    name = "sub-fedavg"
    paper = (
        "Vahidian et al.: Personalized federated learning by structured and unstructured pruning"
    )
    sends = "up: model on the new mask, pruned positions; down: model on the mask"
    density: float = 0.5
    prune_step: float = 0.05
    min_accuracy: float = 0.5
    min_distance: float = 1e-4
    mask_score: str = "magnitude"
    search_batch: int = 128
    layer_sizes: tuple[int, ...] | None = None
    layer_ones: tuple[int, ...] | None = None

    def prepare(self, constants: Constants) -> Algorithm:
        """Every layer ends at the same density."""
        self.check_training()
        check(self.epochs >= 1, "sub-fedavg: epochs must be at least 1.")
        check(0 < self.prune_step <= 1, f"sub-fedavg: prune_step {self.prune_step} not in (0, 1].")
        check(self.search_batch > 0, "sub-fedavg: search_batch must be positive.")
        scores.get(self.mask_score)
        layout = constants.layout
        ones = layer_ones(layout, self.density, "uniform")
        return replace(self, layer_sizes=tuple(layout.sizes), layer_ones=ones)

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {"x": x0, "masks": torch.ones(turn.n, len(x0), dtype=torch.bool)}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        return {"mask": torch.ones(problem.clients, problem.dimension, dtype=torch.bool)}

    def broadcast(self, server: State, turn: Turn) -> Message:
        masks = server["masks"][turn.clients]
        return {"values": Sent([server["x"][mask] for mask in masks])}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        mask, stream = client["mask"], turn.stream("batch")
        w = _together(mask, received["values"])
        rows = calibration_rows(problem, turn.stream("search"), self.search_batch)
        candidates = []
        for epochs in (1, self.epochs - 1):
            w = train(
                problem,
                w,
                stream,
                epochs=epochs,
                batch=self.batch,
                step_size=self.step_size(turn),
                mask=mask,
            )
            score = weight_scores(self.mask_score, problem, w, rows, turn.stream("score"))
            candidates.append(self.pruned(mask, score))
        moved = (candidates[0] ^ candidates[1]).double().mean(1) > self.min_distance
        ready = moved & (_accuracy(problem, w) > self.min_accuracy)
        after = torch.where(ready.unsqueeze(1), candidates[1], mask)
        values = [row[kept] for row, kept in zip(w, after, strict=True)]
        return {"mask": after}, {"values": Sent(values), "pruned": Sent(mask ^ after, bits=0)}

    def pruned(self, mask: Tensor, score: Tensor) -> Tensor:
        """Every client's mask without the lowest 5 % of each layer, not beyond the target."""
        sizes = list(given(self.layer_sizes))
        parts = []
        for m, s, target in zip(
            mask.split(sizes, 1), score.split(sizes, 1), given(self.layer_ones), strict=True
        ):
            rows = []
            for own, rated in zip(m, s.masked_fill(~m, torch.inf), strict=True):
                active = int(own.sum())
                count = min(math.ceil(self.prune_step * active), max(active - target, 0))
                rows.append(own & drop_lowest(rated, count))
            parts.append(torch.stack(rows))
        return torch.cat(parts, 1)

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """The mean over those who kept a weight; without keepers it stays as it is."""
        after = server["masks"][turn.clients] ^ replies["pruned"]
        regrown = bool((replies["pruned"] & after).any())
        check(not regrown, "sub-fedavg: a client pruned weights that it did not have.")
        total = _together(after, replies["values"]).sum(0)
        keepers = after.sum(0)
        x = torch.where(keepers > 0, total / keepers.clamp_min(1), server["x"])
        return {"x": x, "masks": server["masks"].index_copy(0, turn.clients, after)}

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        d = len(server["x"])
        return {"values": Like(server["x"].dtype, None, d), "pruned": Like(torch.bool, (d,))}

    def memory(self, server: State, turn: Turn) -> State:
        return {"mask": server["masks"]}

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        return {"mask": memory["mask"] ^ replies["pruned"]}

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        return client["mask"] * server["x"]

    def metrics(self, server: State, client: State) -> dict[str, float]:
        return {"density": float(client["mask"].double().mean())}


def _together(mask: Tensor, values: Tensor | list[Tensor]) -> Tensor:
    """Ragged values on their masks as `[C, d]`."""
    fits = all(v.numel() == int(m.sum()) for v, m in zip(values, mask, strict=True))
    check(fits, "sub-fedavg: a message has not as many values as its mask.")
    return spread(mask, torch.cat([v.flatten() for v in values]))


def _accuracy(problem: Problem, w: Tensor) -> Tensor:
    """Share of a client's own rows that its model gets right, `[C]`."""
    rows = problem.rows
    right = (problem.loss.predict(w, rows.x) == rows.y) & (rows.weights != 0)
    return right.sum(1) / problem.counts
