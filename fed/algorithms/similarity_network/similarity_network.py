"""Similarity network: a shared part, and personal parts fused over a graph of similar clients.

Communication Efficient Training of Federated Model Over Unbalanced Labels, Algorithms 1 to 5, an
unfinished draft. `min (1/N) sum f_n(A x + B z_n) + lam sum_{(i,j)} ||z_i - z_j||_p` by proximal
gradient: clients send one (compressed) gradient per round, the server steps x and all z. What the
draft leaves open and how it was completed is in `docs/federated/similarity_network.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import torch

from symprune.fed.algorithms.shared.local_steps import local_gradient
from symprune.fed.algorithms.similarity_network.fused_gradient import compress_gradient
from symprune.fed.algorithms.similarity_network.graph import ClientGraph, components
from symprune.fed.algorithms.similarity_network.network_lasso import (
    NORMS,
    fusion,
    network_lasso_prox,
)
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Message, Received, Sent, State, Turn, check, given
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class SimilarityNetwork(ClientGraph):
    """Shared part plus personal parts, fused between neighbours in a similarity graph."""

    name = "similarity-network"
    paper = "Zhao et al.: Communication Efficient Training over Unbalanced Labels, Algorithms 1-5"
    sends = "up: gradient of few values; down: shared part and own part; once: a sketch"
    replies = ("g",)
    lam: float = 1e-3  # strength of the fusion
    p: float = 2.0  # its norm: 1, 2 or inf
    eta: float | None = None  # step of the shared part
    eta_personal: float | None = None  # of the personal part; default N * eta
    decay: bool = False  # steps fall like 1/sqrt(t), for gradients of batches
    batch: int | None = None
    denoise: float = 0.1  # gamma / mean |g| of the fused lasso on gradients; 0: none
    values: int = 4  # k-means on their entries; 0: none
    error_feedback: bool = True
    admm_steps: int = 50

    def prepare(self, constants: Constants) -> Algorithm:
        """eta = 1/L_max (half of it where shared and personal add up), eta_personal = N eta."""
        check(self.lam >= 0, f"lam = {self.lam} must not be negative.")
        check(self.p in NORMS, f"The fusion norm p = {self.p} must be 1, 2 or inf.")
        check(self.denoise >= 0, f"denoise = {self.denoise} must not be negative.")
        check(self.values >= 0, f"values = {self.values} must not be negative.")
        ready = self.complete(constants)
        eta = self.eta
        if eta is None:
            check(constants.known, "similarity-network needs the option eta for this model.")
            eta = 1 / constants.L_max / (2 if ready.placement.additive else 1)
        check(eta > 0, f"eta = {eta} must be positive.")
        own = constants.clients * eta if self.eta_personal is None else self.eta_personal
        return replace(ready, eta=eta, eta_personal=own)

    @property
    def compresses(self) -> bool:
        return self.denoise > 0 or self.values > 0

    def client_init(self, problem: Problem, turn: Turn) -> State:
        if not (self.compresses and self.error_feedback):
            return {}
        return {"error": torch.zeros(problem.clients, problem.dimension, dtype=problem.dtype)}

    def work(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        y = self.own_model(received, problem)
        g = local_gradient(problem, y, self.batch, turn.stream("batch"))
        if not self.compresses:
            return client, {"g": g}
        wanted = g + client["error"] if self.error_feedback else g
        u, bits = compress_gradient(wanted, self.denoise, self.values)
        state = {"error": wanted - u} if self.error_feedback else client
        return state, {"g": Sent(u, bits, table=True)}

    def combine(self, server: State, replies: Received, turn: Turn) -> State:
        """A gradient step on x, a proximal gradient step on all z at once."""
        place, g = self.placement, replies["g"]
        slower = sqrt(turn.number + 1) if self.decay else 1.0
        x = server["x"] - given(self.eta) / slower * place.shared_gradient(g).mean(0)
        eta = given(self.eta_personal) / slower
        own = torch.zeros_like(server["z"])  # who did not reply keeps its place
        own = own.index_copy(0, turn.clients, place.personal_gradient(g))
        target = server["z"] - eta / turn.n * own
        graph = (server["edges"], server["split"], server["multiplier"])
        z, split, multiplier = network_lasso_prox(
            target, *graph, lam=self.lam, eta=eta, p=self.p, steps=self.admm_steps
        )
        return {**server, "x": x, "z": z, "split": split, "multiplier": multiplier}

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """`fusion` is the penalty (the objective is personal_loss + fusion); clusters are the
        components of the edges whose split is exactly zero."""
        edges, n = server["edges"], len(server["z"])
        if len(edges) == 0:
            return {"fusion": 0.0, "clusters": float(n)}
        fused = ~server["split"].any(1)
        penalty = self.lam * float(fusion(server["z"].double(), edges, self.p))
        return {"fusion": penalty, "clusters": float(len(components(edges[fused], n).unique()))}
