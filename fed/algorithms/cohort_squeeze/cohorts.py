"""Methods that keep a cohort for K local rounds: who is in it, which round it is, what it costs.

Cohort Squeeze (thesis chapter 5), Algorithms 8 and 14. A turn of the engine is one local round
(client - hub - client), the server plays the hub. Where the sampling needs clusters and none are
given, the first turn gathers a sketch of every client and the server runs k-means on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from symprune.fed.algorithms.cohort_squeeze.sampling import (
    CLUSTERED,
    SAMPLINGS,
    Sampling,
    cluster,
    make_sampling,
)
from symprune.fed.algorithms.shared.first_sketch import FirstSketch
from symprune.fed.problems.losses import against
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Message, Received, State, Turn, check, filled

SKETCHES = ("features", "labels", "gradient")
MAX_LABEL = 128  # labels -1, 0, 1, ... are counted up to here; zeros cost nothing on the wire
SOLVER = "solver."  # prefix of the proximal solver's entries in the server's state
PATIENCE = 20  # turns per counted iteration after which a line search is given up

Method = TypeVar("Method", bound="CohortMethod")


@dataclass(frozen=True)
class CohortMethod(FirstSketch):
    """Hyper-parameters and functions that the methods with several rounds per cohort share. A
    subclass gives `work` and `solve`, and `begin` if its hub has more to remember."""

    gamma: float = 1.0  # parameter of the proximal step
    local_rounds: int = 5  # K
    sampling: str = "nice"
    cohort_size: int | None = None
    clusters: int | None = None  # number of strata or blocks made by k-means; default 10
    cluster_by: str = "features"  # what clients send once for it: features, labels, gradient
    blocks: tuple[int, ...] | None = None  # or every client's cluster, given
    chances: tuple[float, ...] | None = None  # of nonuniform sampling, or of the blocks
    local_cost: float = 1.0  # c1, client to hub
    global_cost: float = 0.0  # c2, hub to server
    L: tuple[float, ...] | None = filled()  # every client's smoothness
    mu: tuple[float, ...] | None = filled()  # and strong convexity, where the problem knows them

    def begin(self, x: Tensor) -> State:
        """The hub's state at the beginning of a proximal step from x."""
        return {"z": x, "accepted": x, "ahead": x, "iterations": torch.tensor(0)}

    def solve(
        self, hub: State, x: Tensor, replies: Received, sampling: Sampling, cohort: Tensor
    ) -> State:
        """The hub's part of one local round of the proximal step from x."""
        raise TypeError(f"{type(self).__name__} has no solve.")

    @property
    def counts_questions(self) -> bool:
        """Whether K counts every exchange (or only the hub's accepted iterations)."""
        return True

    @property
    def sketched(self) -> bool:
        """Whether the clusters are made from sketches."""
        return self.sampling in CLUSTERED and self.blocks is None

    def sketching(self, turn: Turn) -> bool:
        return self.sketched and turn.number == 0

    def own_sketch(self, received: Received, problem: Problem, turn: Turn) -> Tensor:
        return sketch(problem, self.cluster_by, received["z"])

    def use_sketches(self, server: State, sketches: Tensor, turn: Turn) -> State:
        return {**server, "labels": cluster(sketches, self.clusters or 1, turn.seed)}

    def complete(self: Method, constants: Constants) -> Method:
        """Checked, with open sizes filled in and L_i, mu_i when the problem knows them."""
        check(self.gamma > 0, f"gamma = {self.gamma} must be positive.")
        check(self.local_rounds >= 1, f"local_rounds = {self.local_rounds} must be 1 or more.")
        known = ", ".join(SAMPLINGS)
        check(self.sampling in SAMPLINGS, f"Unknown sampling {self.sampling!r}; use {known}.")
        known = ", ".join(SKETCHES)
        check(self.cluster_by in SKETCHES, f"Cannot cluster by {self.cluster_by!r}; use {known}.")
        few = max(1, min(10, constants.clients // 2))
        size = few if self.sampling == "nice" and not self.cohort_size else self.cohort_size
        ready = replace(
            self,
            cohort_size=size,
            clusters=self.clusters or few,
            L=constants.L if constants.known else None,
            mu=constants.mu if constants.known else None,
        )
        if not ready.sketched:
            ready.drawing(constants.clients, None)
        return ready

    def drawing(self, n: int, labels: Tensor | None) -> Sampling:
        """The sampling, with the clusters the server found or was given."""
        groups = self.blocks if labels is None else labels.tolist()
        return make_sampling(self.sampling, n, self.cohort_size, groups, self.chances, self.mu)

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        state = {
            "x": x0,
            "members": torch.zeros(turn.n, dtype=torch.bool),
            "labels": torch.tensor(self.blocks or (0,) * turn.n),
            "asked": torch.tensor(0),
            "local_rounds": torch.tensor(0),
            "iterations": torch.tensor(0),
            "global_rounds": torch.tensor(0),
        }
        return {**state, **_hidden(self.begin(x0))}

    def cohort(self, server: State, turn: Turn) -> Tensor:
        if self.sketching(turn):
            return torch.arange(turn.n)
        if int(server["asked"]) > 0:
            return server["members"].nonzero().squeeze(1)
        return self.drawing(turn.n, server["labels"]).draw(turn.shared("cohort"))

    def broadcast(self, server: State, turn: Turn) -> Message:
        return {"z": server[SOLVER + "z"]}

    def combine(self, server: State, replies: Received, turn: Turn) -> State:
        """One local round; after the last one x moves and the next cohort is drawn."""
        hub = {k[len(SOLVER) :]: v for k, v in server.items() if k.startswith(SOLVER)}
        sampling = self.drawing(turn.n, server["labels"])
        solved = self.solve(hub, server["x"], replies, sampling, turn.clients)
        asked = server["asked"] + 1
        state = {
            **{"x": server["x"], "labels": server["labels"], "asked": asked},
            "members": torch.zeros_like(server["members"]).index_fill(0, turn.clients, True),
            "local_rounds": server["local_rounds"] + 1,
            "iterations": server["iterations"] + solved["iterations"] - hub["iterations"],
            "global_rounds": server["global_rounds"] + int(asked == 1),
        }
        spent = int(asked if self.counts_questions else solved["iterations"])
        if spent < self.local_rounds and int(asked) < PATIENCE * self.local_rounds:
            return {**state, **_hidden(solved)}
        x = solved["ahead" if self.counts_questions else "accepted"]
        return {**state, "x": x, "asked": torch.zeros_like(asked), **_hidden(self.begin(x))}

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """Cost `c1 * local rounds + c2 * global rounds`; the thesis counts solver iterations in
        place of local rounds, which is done when K counts them too."""
        counted = {k: int(server[k]) for k in ("global_rounds", "local_rounds", "iterations")}
        local = counted["local_rounds" if self.counts_questions else "iterations"]
        cost = self.local_cost * local + self.global_cost * counted["global_rounds"]
        return {**counted, "cost": cost}


@dataclass(frozen=True)
class AnchoredClients(CohortMethod):
    """Clients remember the anchor x of the proximal step while the hub's point z moves on: the
    first local round of a cohort says that z is x. Without `anchored` they need no memory."""

    @property
    def anchored(self) -> bool:
        return True

    def client_init(self, problem: Problem, turn: Turn) -> State:
        zero = torch.zeros(problem.clients, problem.dimension, dtype=problem.dtype)
        return {"x": zero} if self.anchored else {}

    def broadcast(self, server: State, turn: Turn) -> Message:
        point = super().broadcast(server, turn)
        return {**point, "first": server["asked"] == 0} if self.anchored else point

    def anchor(self, client: State, received: Received) -> Tensor:
        """x of this cohort, one row per client."""
        return torch.where(received["first"].view(-1, 1), received["z"], client["x"])

    def memory(self, server: State, turn: Turn) -> State:
        return {"x": server["x"].expand(turn.n, -1)} if self.anchored else {}

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        return {"x": self.anchor(memory, received)} if self.anchored else memory


def average_models(hub: State, models: Tensor, weights: Tensor) -> State:
    """The hub's next point as a weighted mean of the clients' models."""
    share = (weights / weights.sum()).to(models.dtype)
    z = (share.unsqueeze(0) @ models).squeeze(0)
    return {"z": z, "accepted": z, "ahead": z, "iterations": hub["iterations"] + 1}


def sketch(problem: Problem, kind: str, x: Tensor) -> Tensor:
    """What clients tell about themselves so that similar ones can be found, a row each: the mean
    of their features, the share of every label, or their gradient at the common point x."""
    if kind == "gradient":
        return problem.gradient(x)
    rows = problem.rows
    share = rows.weights / rows.weights.sum(1, keepdim=True)
    if kind == "features":
        return against(rows.x.reshape(*rows.y.shape, -1), share)
    labels = rows.y.unsqueeze(-1) == torch.arange(-1, MAX_LABEL, dtype=rows.y.dtype)
    return against(labels.to(share.dtype), share)


def _hidden(hub: State) -> State:
    return {SOLVER + key: value for key, value in hub.items()}
