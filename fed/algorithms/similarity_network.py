"""Similarity network: a shared part, and personal parts fused over a graph of similar clients.

Communication Efficient Training of Federated Model Over Unbalanced Labels, Algorithms 1 to 5, an
unfinished draft. `min (1/N) sum f_n(A x + B z_n) + lam sum_{(i,j)} ||z_i - z_j||_p` by proximal
gradient: clients send one (compressed) gradient per round, the server steps x and all z. What the
draft leaves open and how it was completed is in `docs/federated/similarity_network.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from symprune.fed.fused_gradient import code_bits, fused_lasso, quantise
from symprune.fed.graphs import SPACES, components, nearest_neighbours, sketch, squared_distances
from symprune.fed.network_lasso import NORMS, fusion, network_lasso_prox
from symprune.fed.placement import Placement, make_placement
from symprune.fed.problem import Constants, Problem
from symprune.fed.protocol import (
    MAX_SKETCH,
    Algorithm,
    Like,
    Message,
    Received,
    Sent,
    State,
    Turn,
    check,
    register,
)


@register
@dataclass(frozen=True)
class SimilarityNetwork(Algorithm):
    """Shared part plus personal parts, fused between neighbours in a similarity graph."""

    name = "similarity-network"
    paper = "Zhao et al.: Communication Efficient Training over Unbalanced Labels, Algorithms 1-5"
    sends = "up: gradient of few values; down: shared part and own part; once: a sketch"
    lam: float = 1e-3  # strength of the fusion
    p: float = 2.0  # its norm: 1, 2 or inf
    personal: str = "bias"  # bias, output, all, only, none, or a range such as 10:20
    space: str = "data"  # of the graph: data, feature, model
    neighbours: int | None = None  # k; default 4, or all others if there are fewer
    edges: tuple[tuple[int, int], ...] | None = None  # or the graph itself
    eta: float | None = None  # step of the shared part
    eta_personal: float | None = None  # of the personal part; default N * eta
    decay: bool = False  # steps fall like 1/sqrt(t), for gradients of batches
    batch: int | None = None
    denoise: float = 0.1  # gamma / mean |g| of the fused lasso on gradients; 0: none
    values: int = 4  # k-means on their entries; 0: none
    error_feedback: bool = True
    admm_steps: int = 50
    names: tuple[str, ...] = ()  # the model's tensors; filled in from the problem
    shapes: tuple[tuple[int, ...], ...] = ()

    def prepare(self, constants: Constants) -> Algorithm:
        """eta = 1/L_max (half of it where shared and personal add up), eta_personal = N eta."""
        n = constants.clients
        check(self.lam >= 0, f"lam = {self.lam} must not be negative.")
        check(self.p in NORMS, f"The fusion norm p = {self.p} must be 1, 2 or inf.")
        check(self.space in SPACES, f"Unknown space {self.space!r}; use {', '.join(SPACES)}.")
        check(self.denoise >= 0, f"denoise = {self.denoise} must not be negative.")
        check(self.values >= 0, f"values = {self.values} must not be negative.")
        for i, j in self.edges or ():
            check(0 <= i < n and 0 <= j < n and i != j, f"Edge ({i}, {j}) joins no two clients.")
        ready = replace(self, names=constants.layout.names, shapes=constants.layout.shapes)
        eta = self.eta
        if eta is None:
            check(constants.known, "similarity-network needs the option eta for this model.")
            eta = 1 / constants.L_max / (2 if ready.placement.additive else 1)
        check(eta > 0, f"eta = {eta} must be positive.")
        own = n * eta if self.eta_personal is None else self.eta_personal
        k = min(4, n - 1) if self.neighbours is None else self.neighbours
        return replace(ready, eta=eta, eta_personal=own, neighbours=k)

    @property
    def placement(self) -> Placement:
        shapes = tuple(tuple(shape) for shape in self.shapes)
        return make_placement(tuple(self.names), shapes, self.personal)

    @property
    def compresses(self) -> bool:
        return self.denoise > 0 or self.values > 0

    def sketching(self, turn: Turn) -> bool:
        """Whether this turn gathers the sketches the graph is made from."""
        return self.edges is None and turn.n > 1 and turn.number == 0

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        """x0's entries go to the shared part, or, where there is none, to every personal part."""
        place = self.placement
        x = x0.new_zeros(place.shared_size)
        x[place.shared[place.shared >= 0]] = x0[place.shared >= 0]
        z = x0.new_zeros(place.personal_size)
        alone = (place.personal >= 0) & (place.shared < 0)
        z[place.personal[alone]] = x0[alone]
        z = z.expand(turn.n, -1).clone()
        edges = torch.tensor(self.edges or (), dtype=torch.int64).view(-1, 2)
        none = torch.zeros(len(edges), place.personal_size, dtype=x0.dtype)
        return {"x": x, "z": z, "edges": edges, "split": none, "multiplier": none}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        if not (self.compresses and self.error_feedback):
            return {}
        return {"error": torch.zeros(problem.clients, problem.dimension, dtype=problem.dtype)}

    def broadcast(self, server: State, turn: Turn) -> Message:
        if self.sketching(turn):
            return {"begin": torch.tensor([True])}
        message: Message = {}
        if self.placement.shared_size:
            message["x"] = server["x"]
        if self.placement.personal_size:
            message["z"] = Sent(server["z"][turn.clients], each=True)
        return message

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        if self.sketching(turn):
            return client, {"sketch": sketch(problem, self.space, turn)}
        empty = torch.zeros(problem.clients, 0, dtype=problem.dtype)
        y = self.placement.model(received.get("x", empty), received.get("z", empty))
        rows = None if self.batch is None else problem.batch(turn.stream("batch"), self.batch)
        g = problem.gradient(y, rows)
        if not self.compresses:
            return client, {"g": g}
        wanted = g + client["error"] if self.error_feedback else g
        coded = [self._compress(row) for row in wanted.numpy()]
        u = torch.from_numpy(np.stack([row for row, _ in coded])).to(g.dtype)
        bits = torch.tensor([length for _, length in coded])
        state = {"error": wanted - u} if self.error_feedback else client
        return state, {"g": Sent(u, bits, table=True)}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        if self.sketching(turn):
            assert self.neighbours is not None
            distances = squared_distances(replies["sketch"])
            edges = nearest_neighbours(distances, self.neighbours)
            none = server["z"].new_zeros(len(edges), server["z"].shape[1])
            return {**server, "edges": edges, "split": none, "multiplier": none}
        assert self.eta is not None and self.eta_personal is not None
        place, g = self.placement, replies["g"]
        slower = sqrt(turn.number + 1) if self.decay else 1.0
        x = server["x"] - self.eta / slower * place.shared_gradient(g).mean(0)
        eta = self.eta_personal / slower
        own = torch.zeros_like(server["z"])  # who did not reply keeps its place
        own = own.index_copy(0, turn.clients, place.personal_gradient(g))
        target = server["z"] - eta / turn.n * own
        z, split, multiplier = network_lasso_prox(
            target,
            server["edges"],
            server["split"],
            server["multiplier"],
            self.lam,
            eta,
            self.p,
            steps=self.admm_steps,
        )
        return {**server, "x": x, "z": z, "split": split, "multiplier": multiplier}

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        model = self.model(server)
        if self.sketching(turn):
            return {"sketch": Like(model.dtype, None, MAX_SKETCH)}
        return {"g": Like(model.dtype, tuple(model.shape))}

    def needs_everyone(self, turn: Turn) -> bool:
        return self.sketching(turn)

    def model(self, server: State) -> Tensor:
        """The shared part with the mean personal part."""
        mean = server["z"].mean(0, keepdim=True)
        return self.placement.model(server["x"].unsqueeze(0), mean)[0]

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        z = server["z"][problem.numbers]
        return self.placement.model(server["x"].expand(len(z), -1), z)

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """`fusion` is the penalty (the objective is personal_loss + fusion); clusters are the
        components of the edges whose split is exactly zero."""
        edges, n = server["edges"], len(server["z"])
        if len(edges) == 0:
            return {"fusion": 0.0, "clusters": float(n)}
        fused = ~server["split"].any(1)
        penalty = self.lam * float(fusion(server["z"].double(), edges, self.p))
        return {"fusion": penalty, "clusters": float(len(components(edges[fused], n).unique()))}

    def _compress(self, g: np.ndarray) -> tuple[np.ndarray, int]:
        u = fused_lasso(g, self.denoise * float(np.abs(g).mean())).astype(g.dtype)
        if self.values:
            u = quantise(u, self.values)
        return u, code_bits(u)
