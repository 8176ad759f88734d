"""SPPM-AS (Cohort Squeeze): a cohort exchanges K local rounds before the next one is drawn.

Thesis chapter 5, Algorithm 8: one global iteration is `x <- prox_{gamma f_S}(x)` with
`f_S = sum_{i in S} f_i / (n p_i)`, solved in K local rounds from z = x. One gradient step with
K = 1 is minibatch gradient descent; local steps with K = 1 and gamma = inf are LocalGD (FedAvg).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.algorithms.cohort_squeeze.cohorts import AnchoredClients, average_models
from symprune.fed.algorithms.cohort_squeeze.prox_solvers import (
    HUB_SOLVERS,
    Curvature,
    ProxSolver,
    Worker,
    train_near,
)
from symprune.fed.algorithms.cohort_squeeze.sampling import Sampling
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Like, Message, Received, State, Turn, check
from symprune.fed.registry import register

WORKERS = ("local-sgd", "local-adam")
VALUE_NEEDED = ("cg", "lbfgs")
MEMORY = 20  # pairs that L-BFGS remembers at most


@register
@dataclass(frozen=True)
class SPPM(AnchoredClients):
    """Stochastic proximal point with any client sampling and K local rounds per cohort."""

    name = "sppm-as"
    paper = "Cohort Squeeze (thesis chapter 5), Algorithm 8: SPPM-AS"
    sends = "up: gradient and loss, or local model; down: point; once, for strata: a sketch"
    sampling: str = "stratified"
    solver: str = "lbfgs"  # gd, agd, cg, lbfgs at the hub; local-sgd, local-adam at the clients
    strict: bool = True  # K counts every question of a line search, else accepted steps only
    step: float | None = None  # of gd and the first quasi-Newton step; of the local optimiser
    local_steps: int = 5  # of local-sgd and local-adam, between two local rounds
    batch: int | None = None  # rows per local step; None: all

    def prepare(self, constants: Constants) -> Algorithm:
        """Fill in sizes and the clients' L_i, mu_i; a solver without them needs its step."""
        solvers = (*HUB_SOLVERS, *WORKERS)
        known = ", ".join(solvers)
        check(self.solver in solvers, f"Unknown solver {self.solver!r}; choose from {known}.")
        check(self.local_steps >= 1, f"local_steps = {self.local_steps} must be 1 or more.")
        local = self.batch is None or self.solver in WORKERS
        check(local, f"The solver {self.solver} asks for full gradients; drop the batch size.")
        ready = self.complete(constants)
        given = self.step is not None or (ready.L is not None and self.solver != "local-adam")
        check(given, f"sppm-as with the solver {self.solver} needs the option step here.")
        return ready

    @property
    def counts_questions(self) -> bool:
        return self.strict

    @property
    def anchored(self) -> bool:
        """Whether the clients work on the proximal problem; else the hub does and they measure."""
        return self.solver in WORKERS

    def begin(self, x: Tensor) -> State:
        return super().begin(x) if self.anchored else self._solver(Curvature(1.0)).start(x)

    def work(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        z = received["z"]
        if self.anchored:
            x = self.anchor(client, received)
            near = train_near(problem, x, z, self.worker, turn.stream("batch"))
            return {"x": x}, {"w": near}
        reply: Message = {"g": problem.gradient(z)}
        if self.solver in VALUE_NEEDED:
            reply["f"] = problem.value(z).unsqueeze(1)
        return client, reply

    def work_like(self, server: State, turn: Turn) -> dict[str, Like]:
        like = Like(server["x"].dtype, tuple(server["x"].shape))
        if self.anchored:
            return {"w": like}
        value = {"f": Like(like.dtype, (1,))} if self.solver in VALUE_NEEDED else {}
        return {"g": like, **value}

    def solve(
        self, hub: State, x: Tensor, replies: Received, sampling: Sampling, cohort: Tensor
    ) -> State:
        weights = sampling.weights[cohort]
        if self.anchored:
            return average_models(hub, replies["w"], weights)
        away, weights = hub["z"] - x, weights.to(x.dtype)
        gradient = weights @ replies["g"] + away / self.gamma
        value = away @ away / (2 * self.gamma)
        if self.solver in VALUE_NEEDED:
            value = value + weights @ replies["f"].squeeze(1)
        return self._solver(self._curvature(sampling, cohort)).tell(hub, value, gradient)

    @property
    def worker(self) -> Worker:
        """The step is the same for everyone, or clients with a larger one would count for more."""
        step = self.step or 1 / (max(self.L or (1.0,)) + 1 / self.gamma)
        adam = self.solver == "local-adam"
        return Worker(self.gamma, step, self.local_steps, self.batch, adam)

    def _solver(self, known: Curvature) -> ProxSolver:
        if self.solver == "lbfgs":
            return HUB_SOLVERS["lbfgs"](known, min(MEMORY, self.local_rounds))
        return HUB_SOLVERS[self.solver](known)

    def _curvature(self, sampling: Sampling, cohort: Tensor) -> Curvature:
        """`L_S = sum of L_i / (n p_i)` of this cohort plus 1/gamma, and the same of mu_i."""
        if self.L is None or self.mu is None:
            assert self.step is not None
            return Curvature(self.step)
        weights = sampling.weights[cohort]
        L = float(weights @ torch.tensor(self.L, dtype=torch.float64)[cohort]) + 1 / self.gamma
        mu = float(weights @ torch.tensor(self.mu, dtype=torch.float64)[cohort]) + 1 / self.gamma
        return Curvature(self.step or 1 / L, L / mu if mu > 0 else 1.0)
