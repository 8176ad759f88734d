"""A loss as a function of the kept weights alone: how masks enter every algorithm.

The model is made whole again, with zeros where weights are pruned, before its loss, gradient or
prediction is computed, and of the gradient only the kept part is handed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.problems.layout import KeptLayout
from symprune.fed.problems.losses import Loss
from symprune.fed.problems.models.module_loss import ModuleLoss


@dataclass(frozen=True)
class KeptWeights:
    """`loss` restricted to the weights of the layout."""

    loss: Loss
    layout: KeptLayout

    def __repr__(self) -> str:
        return f"{self.loss!r} with masks {self.layout.digest}"

    @property
    def task(self) -> str:
        return self.loss.task

    def value(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return self.loss.value(self.layout.scatter(w), x, y, weights)

    def gradient(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return self.layout.gather(self.loss.gradient(self.layout.scatter(w), x, y, weights))

    def predict(self, w: Tensor, x: Tensor) -> Tensor:
        return self.loss.predict(self.layout.scatter(w), x)

    def initial(self, seed: int) -> Tensor:
        return self.layout.gather(self.loss.initial(seed))


@dataclass(frozen=True, repr=False)
class KeptColumns(KeptWeights):
    """The same of a linear model, whose smoothness follows from the columns that still count."""

    def smoothness(self, x: Tensor, weights: Tensor) -> Tensor:
        used = self.layout.scatter(x.new_ones(self.layout.dimension)).view(-1, x.shape[-1])
        return self.loss.smoothness(x[..., used.any(0)], weights)  # type: ignore[attr-defined]


@dataclass(frozen=True, repr=False)
class KeptCurvature(KeptColumns):
    """The same where the Hessian is known in closed form."""

    def row_curvature(self, w: Tensor, x: Tensor, weights: Tensor) -> Tensor:
        whole = self.layout.scatter(w)
        return self.loss.row_curvature(whole, x, weights)  # type: ignore[attr-defined]


@dataclass(frozen=True, repr=False)
class KeptModule(KeptWeights):
    """The same of a module, whose training may draw random numbers."""

    @property
    def fixed(self) -> dict[str, Tensor]:
        return self.loss.fixed  # type: ignore[attr-defined, no-any-return]

    @property
    def digest(self) -> str:
        return self.loss.digest  # type: ignore[attr-defined, no-any-return]

    def draws(self, row: Tensor) -> bool:
        return self.loss.draws(row)  # type: ignore[attr-defined, no-any-return]

    def noisy_gradient(
        self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor, seeds: Tensor
    ) -> Tensor:
        whole = self.layout.scatter(w)
        gradient = self.loss.noisy_gradient(  # type: ignore[attr-defined]
            whole, x, y, weights, seeds
        )
        return self.layout.gather(gradient)


def refuse_unpruned(fixed: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
    """What is not trained is not masked either: it must be pruned already."""
    for name in masks:
        if name in fixed and bool(fixed[name][~masks[name].to(fixed[name].device)].any()):
            raise SympruneError(
                f"{name} is not trained and has weights that its mask prunes; prune it first."
            )


def restrict(loss: Loss, layout: KeptLayout) -> KeptWeights:
    """The loss as a function of the layout's weights, with what the loss knows about itself."""
    if hasattr(loss, "row_curvature"):
        return KeptCurvature(loss, layout)
    if hasattr(loss, "noisy_gradient"):
        return KeptModule(loss, layout)
    return (KeptColumns if hasattr(loss, "smoothness") else KeptWeights)(loss, layout)


def place_loss(loss: Loss, device: str | torch.device) -> Loss:
    """The loss with its module, if it has one, on this device."""
    if isinstance(loss, KeptWeights):
        return replace(loss, loss=place_loss(loss.loss, device))
    return loss.to(device) if isinstance(loss, ModuleLoss) else loss  # type: ignore[return-value]
