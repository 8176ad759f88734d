"""Masks over a flat parameter vector, layer by layer, with the same count of ones for everybody.

FedSpa, section 4: ERK or uniform densities, random placement, prune-and-regrow. A mask is `[C, d]`
boolean, one row per client. Matrices and kernels are sparse; biases and normalisation stay dense
and outside the budget. Values travel without positions, since both sides know the mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.randomness import Stream
from symprune.masks import count_true, drop_lowest, keep_largest

ALLOCATIONS = ("erk", "uniform")


def maskable(layout: FlatLayout) -> list[bool]:
    """Which tensors may be sparse: those with two dimensions or more; of a linear model, which has
    none, its weight."""
    matrices = [len(shape) > 1 for shape in layout.shapes]
    return matrices if any(matrices) else [True] * len(matrices)


def erk_densities(
    shapes: list[tuple[int, ...]], density: float, sizes: list[int] | None = None
) -> list[float]:
    """Erdos-Renyi-Kernel: density proportional to `sum(shape)/prod(shape)`, at most 1, and
    `density` over all. FedSpa prints this ratio for "1 - ...", the sparsity; as in the original ERK
    it is the density that is proportional to it. `sizes`: of the tensors, if masks have made them
    smaller than their shapes."""
    sizes = [math.prod(shape) for shape in shapes] if sizes is None else sizes
    ratio = [sum(shape) / max(size, 1) for shape, size in zip(shapes, sizes, strict=True)]
    dense: set[int] = set()
    while len(dense) < len(shapes):
        open_layers = [i for i in range(len(shapes)) if i not in dense]
        budget = density * sum(sizes) - sum(sizes[i] for i in dense)
        scale = budget / sum(ratio[i] * sizes[i] for i in open_layers)
        largest = max(ratio[i] for i in open_layers)
        if scale * largest <= 1:
            return [1.0 if i in dense else scale * ratio[i] for i in range(len(shapes))]
        dense |= {i for i in open_layers if ratio[i] == largest}
    return [1.0] * len(shapes)


def densities(layout: FlatLayout, density: float, allocation: str) -> list[float]:
    """The density of every tensor of the layout."""
    if not 0 < density <= 1:
        raise SympruneError(f"Density {density} is outside (0, 1].")
    if allocation not in ALLOCATIONS:
        raise SympruneError(
            f"Unknown allocation {allocation!r}; choose from {', '.join(ALLOCATIONS)}."
        )
    sparse = maskable(layout)
    shapes = [shape for shape, s in zip(layout.shapes, sparse, strict=True) if s]
    sizes = [size for size, s in zip(layout.sizes, sparse, strict=True) if s]
    uniform = [density] * len(shapes)
    each = erk_densities(shapes, density, sizes) if allocation == "erk" else uniform
    remaining = iter(each)
    return [next(remaining) if s else 1.0 for s in sparse]


def layer_ones(layout: FlatLayout, density: float, allocation: str) -> tuple[int, ...]:
    """How many weights of every tensor are kept."""
    each = densities(layout, density, allocation)
    return tuple(round(r * size) for r, size in zip(each, layout.sizes, strict=True))


def random_mask(sizes: tuple[int, ...], ones: tuple[int, ...], stream: Stream) -> Tensor:
    """Exactly `ones` of `sizes` weights of every tensor at random, `[rows, d]`."""
    parts = []
    for size, count in zip(sizes, ones, strict=True):
        if count == size:
            parts.append(torch.ones(stream.rows, size, dtype=torch.bool))
        else:
            parts.append(keep_largest(stream.uniform(size), count))
    return torch.cat(parts, 1)


def keeps(mask: Tensor, sizes: tuple[int, ...], ones: tuple[int, ...]) -> bool:
    """Whether every row of the mask keeps exactly `ones` weights of every tensor."""
    parts = zip(mask.split(list(sizes), 1), ones, strict=True)
    return all(bool((part.sum(1) == count).all()) for part, count in parts)


def best_mask(score: Tensor, sizes: tuple[int, ...], ones: tuple[int, ...]) -> Tensor:
    """The `ones` highest scores of every tensor, `[C, d]`."""
    parts = [keep_largest(s, c) for s, c in zip(score.split(list(sizes), 1), ones, strict=True)]
    return torch.cat(parts, 1)


def shrink(
    mask: Tensor, score: Tensor, sizes: tuple[int, ...], target: tuple[int, ...], share: float
) -> Tensor:
    """Every row's mask without the lowest `share` of what is left of each tensor, but never fewer
    than `target` ones (Sub-FedAvg)."""
    parts = []
    layers = zip(mask.split(list(sizes), 1), score.split(list(sizes), 1), target, strict=True)
    for m, s, least in layers:
        rows = []
        for own, rated in zip(m, s.masked_fill(~m, torch.inf), strict=True):
            active = int(own.sum())
            count = min(math.ceil(share * active), max(active - least, 0))
            rows.append(own & drop_lowest(rated, count))
        parts.append(torch.stack(rows))
    return torch.cat(parts, 1)


def search_step(
    mask: Tensor,
    keep_score: Tensor,
    grow_score: Tensor,
    sizes: tuple[int, ...],
    rate: float,
    exclude_pruned: bool,
) -> Tensor:
    """`prune_and_regrow` of a share `rate` in every tensor that is not dense."""
    parts = []
    scores = (t.split(list(sizes), 1) for t in (mask, keep_score, grow_score))
    for m, keep, grow in zip(*scores, strict=True):
        ones = int(count_true(m)[0]) if len(m) else 0
        count = 0 if ones == m.shape[1] else math.ceil(rate * ones)
        parts.append(prune_and_regrow(m, keep, grow, count, exclude_pruned) if count else m)
    return torch.cat(parts, 1)


def prune_and_regrow(
    mask: Tensor, keep_score: Tensor, grow_score: Tensor, count: int, exclude_pruned: bool = False
) -> Tensor:
    """FedSpa, Algorithm 2, on one layer `[C, size]`: the `count` active weights with the lowest
    `keep_score` go, the `count` inactive ones with the highest `grow_score` come. What was just
    pruned may come back, unless `exclude_pruned`."""
    active = int(count_true(mask)[0]) if len(mask) else 0
    free = mask.shape[1] - active
    count = min(count, active, free) if exclude_pruned else min(count, active)
    stays = mask & drop_lowest(keep_score.masked_fill(~mask, torch.inf), count)
    taken = mask if exclude_pruned else stays
    comes = keep_largest(grow_score.masked_fill(taken, -torch.inf), count)
    return stays | comes


def values_on(mask: Tensor, w: Tensor) -> Tensor:
    """The kept values of every row, `[C, ones]`; all rows keep equally many."""
    return w[mask].view(len(mask), -1)


def spread(mask: Tensor, values: Tensor) -> Tensor:
    """The inverse of `values_on`: `[C, d]` with zeros where the mask is False."""
    w = torch.zeros(mask.shape, dtype=values.dtype)
    return w.masked_scatter(mask, values)


def pack(mask: Tensor, w: Tensor) -> list[Tensor]:
    """The kept values of every row as a list: rows may keep different numbers."""
    return [row[kept] for row, kept in zip(w, mask, strict=True)]


def unpack(mask: Tensor, values: Tensor | list[Tensor]) -> Tensor:
    """The inverse of `pack`, `[C, d]`."""
    fits = all(v.numel() == int(m.sum()) for v, m in zip(values, mask, strict=True))
    if not fits:
        raise SympruneError("A message has not as many values as its mask.")
    return spread(mask, torch.cat([v.flatten() for v in values]))
