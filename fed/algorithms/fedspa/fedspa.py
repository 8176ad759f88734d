"""FedSpa: one dense model at the server, a sparse mask of constant density per client.

"Achieving Personalized Federated Learning with Sparse Local Models", Algorithms 1-3. The personal
model of client k is `m_k * w`. `search` says how masks evolve: `dst` prunes and regrows
(Algorithm 2), `rsm` keeps the random start (Algorithm 3), `score` picks the mask anew from the
dense model and the client's activations at every visit, with any criterion of the pruning engine.
A new mask is not applied to the client's own weights: regrown weights come from the server.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.algorithms.fedspa.local_scores import GROWTHS, local_scores, search_scores
from symprune.fed.algorithms.fedspa.personal_masks import PersonalMasks
from symprune.fed.algorithms.shared.layer_masks import (
    best_mask,
    keeps,
    random_mask,
    search_step,
    spread,
    values_on,
)
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Like, Message, Received, Sent, State, Turn, check
from symprune.fed.registry import register

SEARCHES = ("dst", "rsm", "score")


@register
@dataclass(frozen=True)
class FedSpa(PersonalMasks):
    """Personal sparse masks of constant density on one dense global model."""

    name = "fedspa"
    paper = "Achieving Personalized Federated Learning with Sparse Local Models, Algorithms 1-3"
    sends = "up: update on the mask, changed mask positions; down: model on the mask"
    search: str = "dst"
    prune_rate: float = 0.5
    anneal_rounds: int = 100
    grow: str = "gradient"
    exclude_pruned: bool = False
    different_masks: bool = False

    def prepare(self, constants: Constants) -> Algorithm:
        check(self.search in SEARCHES, f"fedspa: search {self.search!r} is none of {SEARCHES}.")
        check(self.grow in GROWTHS, f"fedspa: grow {self.grow!r} is none of {GROWTHS}.")
        check(0 <= self.prune_rate <= 1, f"fedspa: prune_rate {self.prune_rate} not in [0, 1].")
        check(self.anneal_rounds > 0, "fedspa: anneal_rounds must be positive.")
        return super().prepare(constants)

    def annealed_rate(self, turn: Turn) -> float:
        """`alpha_t = alpha_0/2 (1 + cos(pi t/(T-1)))`, zero from round T-1 on."""
        last = max(self.anneal_rounds - 1, 1)
        return self.prune_rate / 2 * (1 + math.cos(math.pi * min(turn.number / last, 1)))

    def first_masks(self, turn: Turn, d: int) -> Tensor:
        """At random, from the seed."""
        stream = turn.stream("mask") if self.different_masks else turn.shared("mask")
        mask = random_mask(self.layer_sizes, self.layer_ones, stream)
        return mask.expand(len(turn.clients), -1).contiguous()

    def broadcast(self, server: State, turn: Turn) -> Message:
        if self.search == "score":
            return {"x": server["x"]}
        mask = server["masks"][turn.clients]
        rows = server["x"].expand(len(mask), -1)
        return {"values": Sent(values_on(mask, rows), each=True)}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        mask, before = client["mask"], client["mask"]
        if self.search == "score":
            score = local_scores(received["x"], problem, turn, self.calibration)
            mask = best_mask(score, self.layer_sizes, self.layer_ones)
            start = received["x"] * mask
        else:
            start = spread(mask, received["values"])
        w = self.train_locally(problem, start, turn, turn.stream("batch"), mask=mask)
        update: Message = {"update": values_on(mask, start - w)}
        if self.search == "rsm":
            return client, update
        after = self.next_mask(mask, w, problem, turn) if self.search == "dst" else mask
        # The papers' count leaves the masks out; the bytes have them.
        return {"mask": after}, {**update, "changed": Sent(before ^ after, bits=0)}

    def next_mask(self, mask: Tensor, w: Tensor, problem: Problem, turn: Turn) -> Tensor:
        """Algorithm 2, with the prune rate of this round."""
        rate = self.annealed_rate(turn)
        if rate == 0:
            return mask
        keep, come = search_scores(w, problem, turn, self.calibration, self.grow)
        return search_step(mask, keep, come, self.layer_sizes, rate, self.exclude_pruned)

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """`w <- w - mean of updates`: over the clients, not over the masks that cover a weight."""
        masks = server["masks"][turn.clients]
        after = self.flip_masks(masks, replies)
        whole = keeps(after, self.layer_sizes, self.layer_ones)
        check(whole, "fedspa: a client's mask changed its number of weights.")
        covered = after if self.search == "score" else masks
        x = server["x"] - spread(covered, replies["update"]).mean(0)
        return {"x": x, "masks": server["masks"].index_copy(0, turn.clients, after)}

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        like = {"update": Like(server["x"].dtype, (sum(self.layer_ones),))}
        if self.search != "rsm":
            like["changed"] = Like(torch.bool, tuple(server["x"].shape))
        return like
