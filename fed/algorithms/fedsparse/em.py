"""What the methods of the EM view share: local epochs of SGD, and each client's last model.

An Expectation-Maximization Perspective on Federated Learning: the prior of a method (Gaussian,
spike and slab, Laplace, mixture) decides the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.algorithms.fedsparse.server_optimizers import OPTIMIZERS
from symprune.fed.algorithms.fedsparse.weight_groups import Groups, weight_groups
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, SampledClients, State, Turn, check, filled


@dataclass(frozen=True)
class EMMethod(SampledClients):
    """Hyper-parameters of methods whose clients run epochs of SGD on batches."""

    epochs: int = 1
    batch: int = 32
    lr: float = 0.05  # of the clients' SGD
    pull: float = 0.0  # lambda: of the clients' weights to the server's

    def prepare(self, constants: Constants) -> Algorithm:
        check(self.epochs >= 1, f"{self.name}: epochs = {self.epochs} must be 1 or more.")
        check(self.batch >= 1, f"{self.name}: batch = {self.batch} must be 1 or more.")
        check(self.lr > 0, f"{self.name}: lr = {self.lr} must be positive.")
        check(self.pull >= 0, f"{self.name}: pull = {self.pull} must not be negative.")
        return self

    def client_init(self, problem: Problem, turn: Turn) -> State:
        """The local model last sent, for the accuracy on a client's own test rows only."""
        zero = torch.zeros(problem.clients, problem.dimension, dtype=problem.dtype)
        return {"w": zero, "seen": torch.zeros(problem.clients, dtype=torch.bool)}

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        """What each client last sent; the server's model for those who were never asked."""
        return torch.where(client["seen"].unsqueeze(1), client["w"], self.model(server))


@dataclass(frozen=True)
class GroupedWeights(EMMethod):
    """A method that prunes weights in groups: a neuron's incoming weights, or single weights."""

    gates: str = "neuron"  # or weight
    exempt: tuple[str, ...] = ()  # layers without groups; "output" is the last one
    names: tuple[str, ...] = filled(())  # the model's tensors
    shapes: tuple[tuple[int, ...], ...] = filled(())

    def prepare(self, constants: Constants) -> Algorithm:
        ready = super().prepare(constants)
        layout = constants.layout
        return replace(ready, names=layout.names, shapes=layout.shapes)  # type: ignore[call-arg]

    @property
    def groups(self) -> Groups:
        return weight_groups(self.names, self.shapes, self.gates, self.exempt)


def remember(client: State, w: Tensor) -> State:
    return {"w": w, "seen": torch.ones_like(client["seen"])}


def server_rate(optimizer: str, rate: float | None, cohort: int) -> float:
    """The given learning rate, or Adam's 1e-3, or one over the number of clients: their mean."""
    known = ", ".join(OPTIMIZERS)
    check(optimizer in OPTIMIZERS, f"Unknown optimiser {optimizer!r}; choose from {known}.")
    if rate is not None:
        check(rate > 0, f"server_lr = {rate} must be positive.")
        return rate
    return 1 / cohort if optimizer == "sgd" else 1e-3
