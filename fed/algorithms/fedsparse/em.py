"""What the methods of the EM view share: local epochs of SGD, each client's last model, and groups
of weights that are kept or removed together.

An Expectation-Maximization Perspective on Federated Learning: the prior of a method (Gaussian,
spike and slab, Laplace, mixture) decides the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.algorithms.fedsparse.server_optimizers import OPTIMIZERS
from symprune.fed.devices import cached_per_device
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, LayeredModel, SampledClients, State, Turn, check

GRAINS = ("neuron", "weight")


@dataclass(frozen=True)
class Groups:
    """`of [d]` is every weight's group, `count` for the exempt ones; `sizes [count]`."""

    of: Tensor
    count: int
    sizes: Tensor

    @property
    def exempt(self) -> Tensor:
        return self.of == self.count

    def sum(self, values: Tensor) -> Tensor:
        """`[C, d]` -> `[C, count]`: the sum over each group's weights."""
        out = values.new_zeros(len(values), self.count + 1)
        return out.scatter_add(1, self.of.expand_as(values), values)[:, :-1]

    def norm(self, w: Tensor) -> Tensor:
        return self.sum(w.square()).sqrt()

    def spread(self, gates: Tensor, exempt: float = 1.0) -> Tensor:
        """`[C, count]` -> `[C, d]`: every weight gets its group's value."""
        filled = torch.cat([gates, torch.full_like(gates[:, :1], exempt)], 1)
        return filled[:, self.of]


@cached_per_device
def weight_groups(layout: FlatLayout, grain: str, exempt: tuple[str, ...] = ()) -> Groups:
    """Groups of a model's flat parameter vector; those of which masks keep no weight are none.

    `neuron`: the incoming weights of one output neuron or feature map, with its bias. Layers named
    in `exempt` ("output" is the last one) and tensors without a weight matrix (normalisation) are
    in no group. `weight`: every weight of the other tensors is a group of its own."""
    if grain not in GRAINS:
        raise SympruneError(f"Unknown gates {grain!r}; choose from {', '.join(GRAINS)}.")
    names, shapes = layout.names, layout.shapes
    layers = {_layer(name): s[0] for name, s in zip(names, shapes, strict=True) if len(s) >= 2}
    if not layers:  # one vector of weights, as in logistic regression: a single output
        layers = {_layer(name): 1 for name in names}
    last = list(layers)[-1]
    left_out = {last if name == "output" else name for name in exempt}
    for name in left_out - set(layers):
        raise SympruneError(f"The model has no layer {name!r}; it has {', '.join(layers)}.")
    start, at = {}, 0
    for layer, outputs in layers.items():
        if layer not in left_out:
            start[layer] = at
            at += outputs
    parts, single = [], 0
    for name, shape in zip(names, shapes, strict=True):
        layer, size = _layer(name), int(torch.tensor(shape).prod())
        if layer not in start:
            parts.append(torch.full((size,), -1))
        elif grain == "weight":
            parts.append(torch.arange(single, single + size))
            single += size
        else:
            row = torch.arange(size) // max(1, size // layers[layer])
            parts.append(start[layer] + row)
    of = layout.gather(torch.cat(parts))
    there, of = of.unique(return_inverse=True)  # numbered without gaps, the exempt ones first
    count = int((there >= 0).sum())
    of = torch.where(there[of] < 0, count, of - (len(there) - count))
    return Groups(of, count, torch.bincount(of, minlength=count + 1)[:count])


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or name


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
class GroupedWeights(LayeredModel, EMMethod):
    """A method that prunes weights in groups: a neuron's incoming weights, or single weights."""

    gates: str = "neuron"  # or weight
    exempt: tuple[str, ...] = ()  # layers without groups; "output" is the last one

    def prepare(self, constants: Constants) -> Algorithm:
        return super().prepare(constants).located(constants.layout)

    @property
    def groups(self) -> Groups:
        return weight_groups(self.layout, self.gates, self.exempt)


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
