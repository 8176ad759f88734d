"""Local losses on stacks of clients: logistic, softmax and linear regression in closed form, and
any `nn.Module`.

Every function takes parameters `w [C, d]`, rows `x [C, m, ...]`, targets `y [C, m]` and row weights
`[C, m]` (zero on padding) and treats the C clients at once. A client gets the same bits alone as in
a stack: products go matrix by matrix and only elementwise functions that round alike are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.models.module_loss import ModuleLoss, Parameters, own_randomness


class Loss(Protocol):
    """What a problem needs to know about its loss."""

    @property
    def layout(self) -> FlatLayout: ...

    @property
    def task(self) -> str: ...  # "classification", "regression" or "language"

    def value(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor: ...

    def gradient(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor: ...

    def predict(self, w: Tensor, x: Tensor) -> Tensor: ...

    def initial(self, seed: int) -> Tensor: ...


def product(a: Tensor, b: Tensor) -> Tensor:
    """Stacked matrix product. numpy calls BLAS once per client, so the result does not depend on
    how many clients there are, and for tall thin stacks it is several times faster than bmm."""
    if a.device.type == "cpu":
        return torch.from_numpy(np.matmul(a.numpy(), b.numpy()))
    return torch.matmul(a, b)


def along(x: Tensor, w: Tensor) -> Tensor:
    """`x [C, m, d] . w [C, d]` -> `[C, m]`."""
    return product(x, w.unsqueeze(-1)).squeeze(-1)


def against(x: Tensor, r: Tensor) -> Tensor:
    """`x^T [C, d, m] . r [C, m]` -> `[C, d]`."""
    return product(r.unsqueeze(1), x).squeeze(1)


def largest_eigenvalue(x: Tensor, weights: Tensor) -> Tensor:
    """`lambda_max(X_i^T diag(weights_i) X_i)` of every client."""
    out = []
    for own, weight in zip(x, weights, strict=True):  # in double, so one after the other
        rows = own.double() * weight.double().sqrt().unsqueeze(-1)
        small = rows.T @ rows if rows.shape[1] <= rows.shape[0] else rows @ rows.T
        out.append(torch.linalg.eigvalsh(small)[-1])
    return torch.stack(out).clamp_min(0)


@dataclass(frozen=True)
class Logistic:
    """`sum_j weight_j log(1 + exp(-y_j <x_j, w>))`, labels -1 and +1."""

    features: int
    task = "classification"

    @property
    def layout(self) -> FlatLayout:
        return FlatLayout(("weight",), ((self.features,),))

    def value(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return (weights * softplus(-y * along(x, w))).sum(-1)

    def gradient(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return against(x, -y * weights * sigmoid(-y * along(x, w)))

    def row_curvature(self, w: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        """Second derivative in `<x_j, w>`, times the weight: `[C, m]`."""
        s = sigmoid(along(x, w))
        return weights * s * (1 - s)

    def smoothness(self, x: Tensor, weights: Tensor) -> Tensor:
        return largest_eigenvalue(x, weights) / 4

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        return torch.where(along(x, w) >= 0, 1.0, -1.0).to(x.dtype)

    def initial(self, seed: int) -> Tensor:
        return torch.zeros(self.features, dtype=torch.float64)


@dataclass(frozen=True)
class Softmax:
    """Multinomial logistic regression; put a constant column into x for intercepts."""

    features: int
    classes: int
    task = "classification"

    @property
    def layout(self) -> FlatLayout:
        return FlatLayout(("weight",), ((self.classes, self.features),))

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        return product(x, w.view(-1, self.classes, self.features).transpose(1, 2))

    def value(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        log_chance = self.scores(w, x).log_softmax(-1)
        chosen = log_chance.gather(-1, y.long().unsqueeze(-1)).squeeze(-1)
        return -(weights * chosen).sum(-1)

    def gradient(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        residual = self.scores(w, x).softmax(-1)
        index = y.long().unsqueeze(-1)
        residual.scatter_add_(-1, index, torch.full_like(index, -1, dtype=residual.dtype))
        weighted = residual * weights.unsqueeze(-1)
        return product(weighted.transpose(1, 2), x).reshape(len(x), -1)

    def smoothness(self, x: Tensor, weights: Tensor) -> Tensor:
        return largest_eigenvalue(x, weights) / 2

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        return self.scores(w, x).argmax(-1).to(x.dtype)

    def initial(self, seed: int) -> Tensor:
        return torch.zeros(self.classes * self.features, dtype=torch.float64)


@dataclass(frozen=True)
class Linear:
    """`1/2 sum_j weight_j (<x_j, w> - y_j)^2`."""

    features: int
    task = "regression"

    @property
    def layout(self) -> FlatLayout:
        return FlatLayout(("weight",), ((self.features,),))

    def value(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return (weights * (along(x, w) - y).square()).sum(-1) / 2

    def gradient(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return against(x, weights * (along(x, w) - y))

    def row_curvature(self, w: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        return weights

    def smoothness(self, x: Tensor, weights: Tensor) -> Tensor:
        return largest_eigenvalue(x, weights)

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        return along(x, w)

    def initial(self, seed: int) -> Tensor:
        return torch.zeros(self.features, dtype=torch.float64)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target.long(), reduction="none")


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output.squeeze(-1) - target).square() / 2


@dataclass(frozen=True)
class Module(ModuleLoss):
    """Any `nn.Module` with a loss per row. `make` builds it with its usual random start, or is the
    module itself, which then starts from its own weights. What wants no gradient (`requires_grad`)
    or has a name like one of the patterns in `exempt` is not trained and not sent."""

    make: Callable[[], nn.Module] | nn.Module
    row_loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    task: str = "classification"
    exempt: tuple[str, ...] = ()
    module: nn.Module = field(init=False, compare=False, repr=False)
    layout: FlatLayout = field(init=False, compare=False, repr=False)
    fixed: Parameters = field(init=False, compare=False, repr=False)

    def __repr__(self) -> str:
        held = f", {self.digest}" if self.fixed or any(True for _ in self.module.buffers()) else ""
        return f"Module({type(self.module).__name__}, {self.layout.shapes}{held})"

    def __post_init__(self) -> None:
        # What is not trained must be the same everywhere, so it has a seed, whatever the run's.
        self.adopt(self._made(0), self.exempt)

    def _made(self, seed: int) -> nn.Module:
        if isinstance(self.make, nn.Module):
            return self.make
        with torch.device("cpu"), own_randomness(seed, torch.device("cpu")):
            return self.make()

    def outputs(self, parameters: Parameters, x: Tensor) -> Tensor:
        return functional_call(self.module, parameters, (x,))

    def row_losses(self, parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        return self.row_loss(self.outputs(parameters, x), y)

    def scores(self, w: Tensor, x: Tensor) -> Tensor:
        """The module's outputs for every client."""
        with torch.no_grad():
            if self.can_stack("outputs", self._outputs, (w[:1], x[:1, :1])):
                return vmap(self._outputs)(w, x)
            placed = (
                (self._placed(own), rows.to(self.device)) for own, rows in zip(w, x, strict=True)
            )
            return torch.stack([self.outputs(*each) for each in placed]).to(w.device)

    def _outputs(self, w: Tensor, x: Tensor) -> Tensor:
        return self.outputs({**self.fixed, **self.layout.split(w)}, x)

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        output = self.scores(w, x)
        if self.task == "regression":
            return output.squeeze(-1)
        return output.argmax(-1).to(w.dtype)

    def initial(self, seed: int) -> Tensor:
        fresh = dict(self._made(seed).named_parameters())
        return self.layout.join({name: fresh[name].detach().cpu() for name in self.layout.names})


def sigmoid(z: Tensor) -> Tensor:
    """1 / (1 + e^-z) from exp, which rounds alike at every position of a tensor."""
    return 1 / (1 + torch.exp(-z))


def softplus(z: Tensor) -> Tensor:
    """log(1 + e^z) without overflow."""
    return z.clamp_min(0) + torch.log1p(torch.exp(-z.abs()))
