"""FedSpa: one dense model at the server, a sparse mask of constant density per client.

"Achieving Personalized Federated Learning with Sparse Local Models", Algorithms 1-3. The personal
model of client k is `m_k * w`. `search` says how masks evolve: `dst` prunes and regrows
(Algorithm 2), `rsm` keeps the random start (Algorithm 3), `score` picks the mask anew from the
dense model and the client's activations at every visit, with any criterion of the pruning engine.
A new mask is not applied to the client's own weights: regrown weights come from the server.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune import scores
from symprune.fed.layer_masks import (
    best_mask,
    layer_ones,
    prune_and_regrow,
    random_mask,
    spread,
    values_on,
)
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

SEARCHES = ("dst", "rsm", "score")
GROWTHS = ("gradient", "random")


@register
@dataclass(frozen=True)
class FedSpa(LocalEpochs):
    """Personal sparse masks of constant density on one dense global model."""

    name = "fedspa"
    paper = "Achieving Personalized Federated Learning with Sparse Local Models, Algorithms 1-3"
    sends = "up: update on the mask, changed mask positions; down: model on the mask"
    density: float = 0.5
    allocation: str = "erk"
    search: str = "dst"
    mask_score: str = "magnitude"
    prune_rate: float = 0.5
    anneal_rounds: int = 100
    grow: str = "gradient"
    exclude_pruned: bool = False
    different_masks: bool = False
    search_batch: int = 128
    layer_sizes: tuple[int, ...] | None = None
    layer_ones: tuple[int, ...] | None = None

    def prepare(self, constants: Constants) -> Algorithm:
        """How many weights of every tensor are kept: ERK or uniform at `density`."""
        self.check_training()
        check(self.search in SEARCHES, f"fedspa: search {self.search!r} is none of {SEARCHES}.")
        check(self.grow in GROWTHS, f"fedspa: grow {self.grow!r} is none of {GROWTHS}.")
        check(0 <= self.prune_rate <= 1, f"fedspa: prune_rate {self.prune_rate} not in [0, 1].")
        check(self.anneal_rounds > 0, "fedspa: anneal_rounds must be positive.")
        check(self.search_batch > 0, "fedspa: search_batch must be positive.")
        scores.get(self.mask_score)
        layout = constants.layout
        ones = layer_ones(layout, self.density, self.allocation)
        return replace(self, layer_sizes=tuple(layout.sizes), layer_ones=ones)

    def annealed(self, turn: Turn) -> float:
        """`alpha_t = alpha_0/2 (1 + cos(pi t/(T-1)))`, zero from round T-1 on."""
        last = max(self.anneal_rounds - 1, 1)
        return self.prune_rate / 2 * (1 + math.cos(math.pi * min(turn.number / last, 1)))

    def first_masks(self, turn: Turn) -> Tensor:
        """The random start, which both sides make from the seed: `[C, d]`."""
        stream = turn.stream("mask") if self.different_masks else turn.shared("mask")
        mask = random_mask(given(self.layer_sizes), given(self.layer_ones), stream)
        return mask.expand(len(turn.clients), -1).contiguous()

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {"x": x0, "masks": self.first_masks(turn)}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        return {"mask": self.first_masks(turn)}

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
            mask = self.pick(received["x"], problem, turn)
            start = received["x"] * mask
        else:
            start = spread(mask, received["values"])
        w = train(
            problem,
            start,
            turn.stream("batch"),
            epochs=self.epochs,
            batch=self.batch,
            step_size=self.step_size(turn),
            mask=mask,
        )
        update: Message = {"update": values_on(mask, start - w)}
        if self.search == "rsm":
            return client, update
        after = self.next_mask(mask, w, problem, turn) if self.search == "dst" else mask
        # The papers' count leaves the masks out; the bytes have them.
        return {"mask": after}, {**update, "changed": Sent(before ^ after, bits=0)}

    def pick(self, x: Tensor, problem: Problem, turn: Turn) -> Tensor:
        """Each client's highest-scoring weights of the dense model `x`."""
        rows = calibration_rows(problem, turn.stream("search"), self.search_batch)
        score = weight_scores(self.mask_score, problem, x, rows, turn.stream("score"))
        return best_mask(score, given(self.layer_sizes), given(self.layer_ones))

    def next_mask(self, mask: Tensor, w: Tensor, problem: Problem, turn: Turn) -> Tensor:
        """Algorithm 2: in every sparse layer the `ceil(alpha_t ones)` lowest scores go, and as many
        weights with the largest dense gradient (or any, `grow="random"`) come."""
        rate = self.annealed(turn)
        if rate == 0:
            return mask
        rows = calibration_rows(problem, turn.stream("search"), self.search_batch)
        keep = weight_scores(self.mask_score, problem, w, rows, turn.stream("score"))
        if self.grow == "gradient":
            plain = replace(problem, l2=0.0, nonconvex=0.0)  # the penalty must not choose weights
            come = plain.gradient(w, rows).abs()
        else:
            come = turn.stream("grow").uniform(w.shape[1])
        sizes = list(given(self.layer_sizes))
        parts = []
        layers = zip(mask.split(sizes, 1), keep.split(sizes, 1), come.split(sizes, 1), strict=True)
        for (m, k, g), ones in zip(layers, given(self.layer_ones), strict=True):
            dense = ones == m.shape[1]
            count = math.ceil(rate * ones)
            parts.append(m if dense else prune_and_regrow(m, k, g, count, self.exclude_pruned))
        return torch.cat(parts, 1)

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """`w <- w - mean of updates`: over the clients, not over the masks that cover a weight."""
        masks = server["masks"][turn.clients]
        changed = replies.get("changed")
        after = masks if changed is None else masks ^ changed
        ones = [part.sum(1) for part in after.split(list(given(self.layer_sizes)), 1)]
        whole = all(bool((o == k).all()) for o, k in zip(ones, given(self.layer_ones), strict=True))
        check(whole, "fedspa: a client's mask changed its number of weights.")
        covered = after if self.search == "score" else masks
        x = server["x"] - spread(covered, replies["update"]).mean(0)
        return {"x": x, "masks": server["masks"].index_copy(0, turn.clients, after)}

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        like = {"update": Like(server["x"].dtype, (sum(given(self.layer_ones)),))}
        if self.search != "rsm":
            like["changed"] = Like(torch.bool, tuple(server["x"].shape))
        return like

    def memory(self, server: State, turn: Turn) -> State:
        return {"mask": server["masks"]}

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        return {"mask": memory["mask"] ^ replies["changed"]} if "changed" in replies else memory

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        return client["mask"] * server["x"]

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """Kept share of all weights, and how much of their masks two clients have in common."""
        mask = client["mask"].double()
        kept = mask.sum() / len(mask)
        held = mask.sum(0)
        pairs = (held * (held - 1)).sum() / max(len(mask) * (len(mask) - 1), 1)
        return {"density": float(kept / mask.shape[1]), "mask_overlap": float(pairs / kept)}
