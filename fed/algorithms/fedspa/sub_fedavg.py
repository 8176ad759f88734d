"""Sub-FedAvg: clients start dense and prune their own model a little at a time.

Vahidian et al., "Personalized federated learning by structured and unstructured pruning under data
heterogeneity", the unstructured version, as FedSpa's comparison runs it: a client that is accurate
enough and whose candidate mask still moved during the round prunes 5 % of what is left, per layer,
until the target density; a weight is averaged over the clients that kept it. Any criterion of the
pruning engine may choose what goes (`mask_score`); the paper's is magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.algorithms.fedspa.local_scores import local_scores
from symprune.fed.algorithms.fedspa.personal_masks import PersonalMasks
from symprune.fed.algorithms.shared.layer_masks import pack, shrink, unpack
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Like, Message, Received, Sent, State, Turn, check
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class SubFedAvg(PersonalMasks):
    """Personal masks that shrink from dense to a target, each weight averaged by its keepers."""

    name = "sub-fedavg"
    paper = "Vahidian et al.: Personalized FL by structured and unstructured pruning"
    sends = "up: model on the new mask, pruned positions; down: model on the mask"
    flips = "pruned"
    allocation: str = "uniform"
    prune_step: float = 0.05
    min_accuracy: float = 0.5
    min_distance: float = 1e-4

    def prepare(self, constants: Constants) -> Algorithm:
        check(self.epochs >= 1, "sub-fedavg: epochs must be at least 1.")
        check(0 < self.prune_step <= 1, f"sub-fedavg: prune_step {self.prune_step} not in (0, 1].")
        return super().prepare(constants)

    def first_masks(self, turn: Turn, d: int) -> Tensor:
        return torch.ones(len(turn.clients), d, dtype=torch.bool)

    def broadcast(self, server: State, turn: Turn) -> Message:
        masks = server["masks"][turn.clients]
        return {"values": Sent([server["x"][mask] for mask in masks])}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        mask, stream = client["mask"], turn.stream("batch")
        w = unpack(mask, received["values"])
        sizes, target, candidates = self.layer_sizes, self.layer_ones, []
        for epochs in (1, self.epochs - 1):
            w = self.train_locally(problem, w, turn, stream, epochs=epochs, mask=mask)
            score = local_scores(w, problem, turn, self.calibration)
            candidates.append(shrink(mask, score, sizes, target, self.prune_step))
        moved = (candidates[0] ^ candidates[1]).double().mean(1) > self.min_distance
        ready = moved & (_accuracy(problem, w) > self.min_accuracy)
        after = torch.where(ready.unsqueeze(1), candidates[1], mask)
        values = Sent(pack(after, w))
        return {"mask": after}, {"values": values, "pruned": Sent(mask ^ after, bits=0)}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """The mean over those who kept a weight; without keepers it stays as it is."""
        after = self.flip_masks(server["masks"][turn.clients], replies)
        regrown = bool((replies["pruned"] & after).any())
        check(not regrown, "sub-fedavg: a client pruned weights that it did not have.")
        total = unpack(after, replies["values"]).sum(0)
        keepers = after.sum(0)
        x = torch.where(keepers > 0, total / keepers.clamp_min(1), server["x"])
        return {"x": x, "masks": server["masks"].index_copy(0, turn.clients, after)}

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        d = len(server["x"])
        return {"values": Like(server["x"].dtype, None, d), "pruned": Like(torch.bool, (d,))}


def _accuracy(problem: Problem, w: Tensor) -> Tensor:
    """Share of a client's own rows that its model gets right, `[C]`."""
    rows = problem.rows
    right = (problem.loss.predict(w, rows.x) == rows.y) & (rows.weights != 0)
    return right.sum(1) / problem.counts
