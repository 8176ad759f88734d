"""A graph of similar clients, made before training from one sketch of every client.

Communication Efficient Training of Federated Model Over Unbalanced Labels, section IV.A: the first
turn gathers the sketches and the server links every client to its nearest neighbours. With the
graph given as `edges` that turn is saved. The source names three spaces and KNN and gives no
formulas; the sketches here are this project's completion. Every sketch is a vector whose squared
Euclidean distance is the distance of its space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from symprune.fed.algorithms.shared.first_sketch import FirstSketch
from symprune.fed.algorithms.similarity_network.personal_parts import PersonalParts
from symprune.fed.problems.losses import against, product
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Message, Received, State, Turn, check, given

SPACES = ("data", "feature", "model")
FOURIER = 64  # random features of the kernel's mean embedding
RIDGE = 0.1  # of the local models that are compared in model space
MODEL_STEPS = 300
Method = TypeVar("Method", bound="ClientGraph")


def sketch(problem: Problem, space: str, turn: Turn) -> Tensor:
    """What the clients of `problem` send once, a row each."""
    check(space in SPACES, f"Unknown similarity space {space!r}; choose from {', '.join(SPACES)}.")
    return {"data": mean_embedding, "feature": covariance, "model": local_model}[space](
        problem, turn
    )


def mean_embedding(problem: Problem, turn: Turn) -> Tensor:
    """Mean over a client's rows of `phi(x)` in the slot of its label, `phi` random Fourier features
    of a Gaussian kernel: distances are the squared MMD of `k(x, x') 1[y = y']`."""
    x, labels, share = _table(problem)
    shared = turn.shared("fourier")
    width = x.shape[-1]
    direction = (shared.normal(width, FOURIER)[0] / math.sqrt(width)).to(x.dtype)
    phase = (2 * math.pi * shared.uniform(FOURIER)[0]).to(x.dtype)
    angle = product(x, direction.expand(len(x), -1, -1)) + phase
    phi = math.sqrt(2 / FOURIER) * torch.cos(angle)
    weighted = labels * share.unsqueeze(-1)
    return product(weighted.transpose(1, 2), phi).reshape(len(x), -1)


def covariance(problem: Problem, turn: Turn) -> Tensor:
    """Upper triangle of the covariance of (features, one-hot label) plus 0.01 I; off-diagonal
    entries times sqrt(2), so that distances are Frobenius norms."""
    x, labels, share = _table(problem)
    both = torch.cat([x, labels], 2)
    mean = against(both, share).unsqueeze(1)
    centred = (both - mean) * (share > 0).unsqueeze(-1)
    matrix = product((centred * share.unsqueeze(-1)).transpose(1, 2), centred)
    q = both.shape[2]
    matrix = matrix + 0.01 * torch.eye(q, dtype=x.dtype)
    row, column = torch.triu_indices(q, q)
    scale = torch.where(row == column, 1.0, math.sqrt(2)).to(x.dtype)
    return matrix[:, row, column] * scale


def local_model(problem: Problem, turn: Turn) -> Tensor:
    """Every client's own ridge-regularised model, by a fixed number of Nesterov steps from 0."""
    constants = problem.constants()
    check(constants.known, "Model space needs a model with known smoothness, such as softmax.")
    L = torch.tensor(constants.L, dtype=torch.float64).unsqueeze(1) + RIDGE
    root = (L / RIDGE).sqrt()
    step, momentum = (1 / L).to(problem.dtype), ((root - 1) / (root + 1)).to(problem.dtype)
    w = torch.zeros(problem.clients, problem.dimension, dtype=problem.dtype)
    y = w
    for _ in range(MODEL_STEPS):
        ahead = y - step * (problem.gradient(y) + RIDGE * y)
        y, w = ahead + momentum * (ahead - w), ahead
    return w


def squared_distances(sketches: Tensor) -> Tensor:
    """`[n, F]` -> `[n, n]`, in float64."""
    s = sketches.double()
    return (s.unsqueeze(1) - s.unsqueeze(0)).square().sum(2)


def nearest_neighbours(distances: Tensor, k: int) -> Tensor:
    """Edges `[E, 2]`, i < j, in order: i and j are joined if one is among the k nearest of the
    other (ties by index). Each pair counts once; the source's sum would count mutual ones twice."""
    n = len(distances)
    check(1 <= k < n, f"Cannot take {k} nearest neighbours among {n} clients.")
    masked = distances.clone().fill_diagonal_(math.inf)
    near = masked.argsort(dim=1, stable=True)[:, :k]
    joined = torch.zeros(n, n, dtype=torch.bool)
    joined[torch.arange(n).unsqueeze(1), near] = True
    return torch.triu(joined | joined.T, 1).nonzero()


def incidence(edges: Tensor, n: int) -> Tensor:
    """`Q [n, E]`: column e = (i, j) has +1 at i and -1 at j; `Q Q^T` is the graph's Laplacian."""
    Q = torch.zeros(n, len(edges), dtype=torch.float64)
    column = torch.arange(len(edges))
    Q[edges[:, 0], column], Q[edges[:, 1], column] = 1.0, -1.0
    return Q


def components(edges: Tensor, n: int) -> Tensor:
    """The connected component of every node, numbered by first member."""
    label = torch.arange(n)
    for i, j in edges.tolist():
        a, b = sorted((int(label[i]), int(label[j])))
        label = torch.where(label == b, a, label)
    return label


def _table(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `[C, m, q]`, one-hot labels `[C, m, classes]` (a column of ones for regression), and the
    share of every row."""
    rows = problem.rows
    share = rows.weights / rows.weights.sum(1, keepdim=True)
    x = rows.x.reshape(*rows.y.shape, -1)
    if problem.loss.task != "classification":
        return x, torch.ones_like(rows.y).unsqueeze(-1), share
    shapes = [shape for shape in problem.layout.shapes if len(shape) >= 2]
    names = torch.tensor([-1.0, 1.0]) if not shapes else torch.arange(shapes[-1][0])
    return x, (rows.y.unsqueeze(-1) == names).to(x.dtype), share


@dataclass(frozen=True)
class ClientGraph(FirstSketch, PersonalParts):
    """Which clients are neighbours. A subclass gives `work` (a client's part of a turn) and
    `combine` (the server's); server state `edges`, and `split`, `multiplier` of its solver."""

    space: str = "data"  # where clients are compared: data, feature, model
    neighbours: int | None = None  # k; default 4, or all others if there are fewer
    edges: tuple[tuple[int, int], ...] | None = None  # or the graph itself

    def complete(self: Method, constants: Constants) -> Method:
        """Checked, with the model's tensors and k filled in."""
        n = constants.clients
        check(self.space in SPACES, f"Unknown space {self.space!r}; use {', '.join(SPACES)}.")
        for i, j in self.edges or ():
            check(0 <= i < n and 0 <= j < n and i != j, f"Edge ({i}, {j}) joins no two clients.")
        k = min(4, n - 1) if self.neighbours is None else self.neighbours
        return replace(self, layout=constants.layout, neighbours=k)

    def sketching(self, turn: Turn) -> bool:
        return self.edges is None and turn.n > 1 and turn.number == 0

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        edges = torch.tensor(self.edges or (), dtype=torch.int64).view(-1, 2)
        return link_clients(super().server_init(x0, turn), edges)

    def broadcast(self, server: State, turn: Turn) -> Message:
        if self.sketching(turn):
            return {"begin": torch.tensor([True])}
        return super().broadcast(server, turn)

    def own_sketch(self, received: Received, problem: Problem, turn: Turn) -> Tensor:
        return sketch(problem, self.space, turn)

    def use_sketches(self, server: State, sketches: Tensor, turn: Turn) -> State:
        distances = squared_distances(sketches)
        return link_clients(server, nearest_neighbours(distances, given(self.neighbours)))


def link_clients(server: State, edges: Tensor) -> State:
    """The server's state with this graph: the solver of the z begins anew."""
    none = server["z"].new_zeros(len(edges), server["z"].shape[1])
    return {**server, "edges": edges, "split": none, "multiplier": none}
