"""A graph of similar clients, made before training from one sketch of every client.

Communication Efficient Training of Federated Model Over Unbalanced Labels, section IV.A: the first
turn gathers the sketches and the server links every client to its nearest neighbours. With the
graph given as `edges` that turn is saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from symprune.fed.algorithms.shared.first_sketch import FirstSketch
from symprune.fed.algorithms.similarity_network.graph import (
    SPACES,
    nearest_neighbours,
    sketch,
    squared_distances,
)
from symprune.fed.algorithms.similarity_network.personal_parts import PersonalParts
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Message, Received, State, Turn, check, given

Method = TypeVar("Method", bound="ClientGraph")


@dataclass(frozen=True)
class ClientGraph(FirstSketch, PersonalParts):
    """Which clients are neighbours. A subclass gives `work` (a client's part of a turn) and
    `combine` (the server's); server state `edges`, and `split`, `multiplier` of its solver."""

    space: str = "data"  # where clients are compared: data, feature, model
    neighbours: int | None = None  # k; default 4, or all others if there are fewer
    edges: tuple[tuple[int, int], ...] | None = None  # or the graph itself

    def completed(self: Method, constants: Constants) -> Method:
        """Checked, with the model's tensors and k filled in."""
        n = constants.clients
        check(self.space in SPACES, f"Unknown space {self.space!r}; use {', '.join(SPACES)}.")
        for i, j in self.edges or ():
            check(0 <= i < n and 0 <= j < n and i != j, f"Edge ({i}, {j}) joins no two clients.")
        k = min(4, n - 1) if self.neighbours is None else self.neighbours
        layout = constants.layout
        return replace(self, names=layout.names, shapes=layout.shapes, neighbours=k)

    def sketching(self, turn: Turn) -> bool:
        return self.edges is None and turn.n > 1 and turn.number == 0

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        edges = torch.tensor(self.edges or (), dtype=torch.int64).view(-1, 2)
        return linked(super().server_init(x0, turn), edges)

    def broadcast(self, server: State, turn: Turn) -> Message:
        if self.sketching(turn):
            return {"begin": torch.tensor([True])}
        return super().broadcast(server, turn)

    def own_sketch(self, received: Received, problem: Problem, turn: Turn) -> Tensor:
        return sketch(problem, self.space, turn)

    def introduced(self, server: State, sketches: Tensor, turn: Turn) -> State:
        distances = squared_distances(sketches)
        return linked(server, nearest_neighbours(distances, given(self.neighbours)))


def linked(server: State, edges: Tensor) -> State:
    """The server's state with this graph: the solver of the z begins anew."""
    none = server["z"].new_zeros(len(edges), server["z"].shape[1])
    return {**server, "edges": edges, "split": none, "multiplier": none}
