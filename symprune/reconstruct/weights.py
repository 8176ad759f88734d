"""What a reconstruction trains: the kept weights of a parameter, in fp32 whatever its type is.

`MaskedWeights` are trained as they are. `GridWeights` are seen by the block as rounded to their
grid; gradients pass the rounding as if nothing had been rounded (straight-through), and those of a
scale are LSQ's (Esser et al. 2020): d(scale x level) / d(scale) = level - weight / scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from symprune.values.grid import Grid, OnGrid, in_groups, per_scale, spread
from symprune.values.scales import nearest_levels, round_scale

REACH = 0.45  # of the way to the next level, at which a weight is still nearest to its own


class MaskedWeights:
    """A parameter whose removed weights stay zero.

    weight is the parameter as it is, keep its mask, laid out alike. stored is the type it will be
    written in.
    """

    def __init__(self, weight: Tensor, keep: Tensor, stored: torch.dtype) -> None:
        self.type = weight.dtype
        self.stored = stored
        self.removed = ~keep.to(weight.device)
        self.leaf = weight.detach().float().clone().requires_grad_()

    def groups(self, rate: float, scale_rate: float) -> list[dict[str, Any]]:
        """What Adam trains, at rates relative to the size of a kept weight."""
        return [{"params": [self.leaf], "lr": rate * _size(self.leaf, self.removed)}]

    def made(self) -> Tensor:
        """The parameter as the block takes it; gradients pass."""
        return self.leaf.to(self.type)

    def mask_gradient(self) -> None:
        if self.leaf.grad is not None:
            self.leaf.grad.masked_fill_(self.removed, 0)

    @torch.no_grad()
    def written(self) -> Tensor:
        """The parameter as those see it who read what is written now."""
        return self.leaf.detach().to(self.stored).to(self.type)

    def values(self) -> dict[str, OnGrid]:
        """Its matrices on a grid, by name: none."""
        return {}


class GridWeights:
    """A parameter on a grid: one matrix, or as many stacked as have names.

    values has its matrices; keep is the mask laid out like the parameter. unrounded, by the names
    of matrices, is what became the values: a weight starts there, or as near as its code allows, so
    that it is known which code is next. Rows of all matrices are trained as one matrix.
    """

    def __init__(
        self,
        weight: Tensor,
        keep: Tensor,
        values: dict[str, OnGrid],
        transposed: bool,
        unrounded: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.type, self.shape = weight.dtype, weight.shape
        self.transposed, self.names = transposed, list(values)
        self.grid = next(iter(values.values())).grid
        self.keep = self._rows(keep).to(weight.device)
        start = OnGrid(
            torch.cat([value.codes for value in values.values()]).to(weight.device),
            torch.cat([value.scales for value in values.values()]).to(weight.device),
            self.grid,
        )
        found = [(unrounded or {}).get(name) for name in self.names]
        weights = start.dense(self.keep)
        if all(each is not None for each in found):
            near = torch.cat([each for each in found if each is not None]).to(weight.device)
            weights = _start_near(near.float(), start).masked_fill_(~self.keep, 0)
        self.leaf = weights.requires_grad_()
        self.scales = start.scales.float().requires_grad_()

    def groups(self, rate: float, scale_rate: float) -> list[dict[str, Any]]:
        size = _size(self.leaf, ~self.keep)
        found = [{"params": [self.leaf], "lr": rate * size}]
        if scale_rate:
            usual = _size(self.scales, self.scales == 0)
            found.append({"params": [self.scales], "lr": scale_rate * usual})
        return found

    def made(self) -> Tensor:
        rounded: Tensor = _Round.apply(self.leaf, self.scales, self.keep, self.grid)  # type: ignore[no-untyped-call]
        return self._laid_out(rounded).to(self.type)

    def mask_gradient(self) -> None:
        """Removed weights have no gradient behind the rounding."""

    @torch.no_grad()
    def written(self) -> Tensor:
        return self._laid_out(self._on_grid().dense(self.keep)).to(self.type)

    def values(self) -> dict[str, OnGrid]:
        found, count = self._on_grid(), len(self.names)
        pieces = zip(found.codes.chunk(count), found.scales.chunk(count), strict=True)
        made = (OnGrid(codes.clone(), scales.clone(), self.grid) for codes, scales in pieces)
        return dict(zip(self.names, made, strict=True))

    @torch.no_grad()
    def _on_grid(self) -> OnGrid:
        scales = round_scale(self.scales.detach())
        levels = nearest_levels(self.leaf.detach(), scales, self.grid)
        return OnGrid.from_levels(levels, scales, self.grid, self.keep)

    def _rows(self, parameter: Tensor) -> Tensor:
        """Laid out like the parameter -> `[matrices x out, in]`."""
        pieces = parameter.reshape(len(self.names), -1, parameter.shape[-1])
        pieces = pieces.mT if self.transposed else pieces
        return pieces.reshape(-1, pieces.shape[-1])

    def _laid_out(self, rows: Tensor) -> Tensor:
        pieces = rows.view(len(self.names), -1, rows.shape[-1])
        return (pieces.mT if self.transposed else pieces).reshape(self.shape)


def _start_near(weight: Tensor, start: OnGrid) -> Tensor:
    """The weights where they are nearest to their own level; else within reach of it, on the side
    they are on."""
    each = spread(start.scales, weight.shape[1])
    level, ratio = start.grid.levels(start.codes), weight * per_scale(each)
    reach = level + REACH * (ratio - level).sign()
    return torch.where(start.grid.nearest(ratio) == level, ratio, reach).mul_(each)


Weights = MaskedWeights | GridWeights


class _Round(torch.autograd.Function):
    """scale x nearest level under a mask, with LSQ's gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scales: Tensor, keep: Tensor, grid: Grid) -> Tensor:
        each = spread(round_scale(scales), weight.shape[1])
        ratio = weight * per_scale(each)
        level = grid.nearest(ratio)
        inside = (ratio >= grid.least) & (ratio <= grid.most)
        ctx.save_for_backward(level - ratio * inside, inside & keep, keep)
        return (level * each).masked_fill_(~keep, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        by_scale, free, keep = ctx.saved_tensors
        gradient = gradients[0]
        of_scales = in_groups(by_scale.mul(gradient).mul_(keep)).sum(-1)
        return gradient * free, of_scales, None, None


def _size(weights: Tensor, removed: Tensor) -> float:
    """The root mean square of what stays; 0 where nothing does."""
    there = removed.numel() - int(removed.sum())
    total = weights.detach().square().masked_fill_(removed, 0).sum(dtype=torch.float64)
    return float((total / max(there, 1)).sqrt())


def keep_state(trained: Sequence[Weights]) -> list[Tensor]:
    """A copy of all that is trained."""
    return [leaf.detach().clone() for leaf in _leaves(trained)]


@torch.no_grad()
def restore_state(trained: Sequence[Weights], state: list[Tensor]) -> None:
    for leaf, kept in zip(_leaves(trained), state, strict=True):
        leaf.copy_(kept)


def _leaves(trained: Sequence[Weights]) -> list[Tensor]:
    return [
        leaf
        for each in trained
        for leaf in ([each.leaf, each.scales] if isinstance(each, GridWeights) else [each.leaf])
    ]
