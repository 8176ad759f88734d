"""Which layers a client trains and sends, how they are pruned for it, and how they are averaged.

FedP3, thesis chapter 4: layer subsets (OPU1-3, LowerB), global pruning P_i, local pruning Q_i and
layer-wise aggregation (Algorithms 5-7). A layer is a weight with everything one-dimensional that
follows it (bias, normalisation); the last one, FFC, belongs to every client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.randomness import Stream
from symprune.masks import keep_largest

Shapes = tuple[tuple[int, ...], ...]
SUBSETS = {
    "full": None,
    "opu3": (3,),
    "opu2": (2,),
    "opu1": (1,),
    "lowerb": (1,),
    "opu1-2-3": (1, 2, 3),
    "opu2-3": (2, 3),
}
KINDS = {
    "prune": ("random", "magnitude", "ordered"),
    "local_prune": ("fixed", "uniform", "ordered"),
    "aggregation": ("simple", "weighted", "attention", "learned"),
}


def layer_numbers(shapes: Shapes) -> list[int]:
    """The layer every tensor belongs to: each matrix or kernel begins a new one."""
    number, out = -1, []
    for shape in shapes:
        if len(shape) > 1 or number < 0:
            number += 1
        out.append(number)
    return out


def layer_sizes(layout: FlatLayout) -> list[int]:
    """Parameters of every layer."""
    sizes = [0] * (layer_numbers(layout.shapes)[-1] + 1)
    for number, size in zip(layer_numbers(layout.shapes), layout.sizes, strict=True):
        sizes[number] += size
    return sizes


def by_weight(values: Tensor, layout: FlatLayout) -> Tensor:
    """Values per layer `[C, layers]` repeated for every parameter, `[C, d]`."""
    each = torch.tensor(layer_numbers(layout.shapes)).repeat_interleave(torch.tensor(layout.sizes))
    return values[:, each]


def assign(rule: str, layers: int, stream: Stream) -> Tensor:
    """The layers of every client, `[C, layers]` boolean.

    `opu2` and the like: so many of the layers before FFC, uniformly (`opu1-2-3`: of a random
    size). `drop:5-8,9-12`: all but one of these ranges, chosen at random; `none` drops nothing
    (the ResNet ablation)."""
    if rule.startswith("drop:"):
        return _all_but_one_range(rule, layers, stream)
    if rule not in SUBSETS:
        raise SympruneError(f"Unknown layer rule {rule!r}; choose from {', '.join(SUBSETS)}, drop:")
    sizes = SUBSETS[rule]
    if sizes is None:
        return torch.ones(stream.rows, layers, dtype=torch.bool)
    size = torch.tensor(sizes)[stream.integers(len(sizes), 1)]
    place = stream.permutation(layers - 1).argsort(dim=1)
    last = torch.ones(stream.rows, 1, dtype=torch.bool)
    return torch.cat([place < size, last], 1)


def assign_layers(rule: str, layout: FlatLayout, stream: Stream) -> Tensor:
    """`assign` for the layers of a model."""
    return assign(rule, layer_numbers(layout.shapes)[-1] + 1, stream)


def _all_but_one_range(rule: str, layers: int, stream: Stream) -> Tensor:
    options = []
    for text in rule.removeprefix("drop:").split(","):
        owned = torch.ones(layers, dtype=torch.bool)
        if text != "none":
            first, _, last = text.partition("-")
            if not (first.isdigit() and last.isdigit() and int(first) <= int(last) < layers - 1):
                raise SympruneError(f"Layers {text!r} in {rule!r} are no range in 0-{layers - 2}.")
            owned[int(first) : int(last) + 1] = False
        options.append(owned)
    return torch.stack(options)[stream.integers(len(options), 1).squeeze(1)]


def prune_mask(
    kind: str,
    keep: float,
    layout: FlatLayout,
    owned: Tensor,
    stream: Stream,
    x: Tensor | None = None,
) -> Tensor:
    """What P_i leaves of the layers a client does not own, `[C, d]`; owned layers and biases stay.

    `random`: exactly `round(keep size)` weights of a tensor; `magnitude`: the largest of `x`;
    `ordered`: a leading block. Nothing is rescaled."""
    parts: list[Tensor] = []
    for tensor, number, shape, size in _tensors(layout):
        mine = owned[:, number : number + 1]
        if len(shape) < 2:
            parts.append(torch.ones(len(owned), size, dtype=torch.bool))
            continue
        if kind == "random":
            kept = keep_largest(stream.uniform(size), round(keep * size))
        elif kind == "magnitude":
            assert x is not None
            start = sum(part.shape[1] for part in parts)
            kept = keep_largest(x[start : start + size].abs(), round(keep * size)).unsqueeze(0)
        elif kind == "ordered":
            ratio = torch.full((len(owned), 1), keep, dtype=torch.float64)
            kept = layout.gather_part(tensor, leading_block(shape, ratio, cut_inputs=number > 0))
        else:
            raise SympruneError(f"Unknown pruning {kind!r}; choose random, magnitude or ordered.")
        parts.append(kept | mine)
    return torch.cat(parts, 1)


def _tensors(layout: FlatLayout) -> Iterator[tuple[int, int, tuple[int, ...], int]]:
    """Every tensor's number, its layer's, its shape, and how many weights it has."""
    numbers = layer_numbers(layout.shapes)
    yield from zip(range(len(numbers)), numbers, layout.shapes, layout.sizes, strict=True)


def local_mask(
    kind: str, ratio: Tensor, layout: FlatLayout, owned: Tensor, stream: Stream
) -> Tensor:
    """Q_i's mask of one local step, `[C, d]`, at the keep ratios `[C, 1]`: a fresh random one
    (`uniform`) or FjORD's leading block (`ordered`). Input features of the model are never cut."""
    parts = []
    for tensor, number, shape, size in _tensors(layout):
        mine = owned[:, number : number + 1]
        if len(shape) < 2:
            parts.append(torch.ones(len(owned), size, dtype=torch.bool))
        elif kind == "uniform":
            parts.append((stream.uniform(size) < ratio) | mine)
        else:
            block = leading_block(shape, ratio, cut_inputs=number > 0)
            parts.append(layout.gather_part(tensor, block) | mine)
    return torch.cat(parts, 1)


def leading_block(shape: tuple[int, ...], ratio: Tensor, cut_inputs: bool) -> Tensor:
    """True on `[:ceil(q d1), :ceil(q d2)]` of a weight, `[C, size]`, for the ratios q `[C, 1]`."""
    rows = torch.arange(shape[0]) < (ratio * shape[0]).ceil()
    columns = torch.arange(shape[1]) < (ratio * shape[1]).ceil()
    if not cut_inputs:
        columns = torch.ones_like(columns)
    block = rows.unsqueeze(2) & columns.unsqueeze(1)
    rest = math.prod(shape[2:])
    return block.unsqueeze(3).expand(-1, -1, -1, rest).reshape(len(ratio), -1)


def aggregate(alpha: Tensor, x: Tensor, u: Tensor, owned: Tensor, layout: FlatLayout) -> Tensor:
    """`W^l <- sum_i alpha_i^l U_i^l` over the clients that own layer l; a layer without owners
    stays."""
    mean = (by_weight(alpha, layout).to(x.dtype) * u).sum(0)
    return torch.where(by_weight(owned, layout).any(0), mean, x)


def aggregation_weights(
    kind: str, owned: Tensor, update: Tensor, layout: FlatLayout, temperature: float
) -> Tensor:
    """alpha `[C, layers]`: equal (simple), by the number of layers a client trains (weighted), or
    by `-||U_i^l - W^l|| / temperature` (attention)."""
    theta = torch.zeros(owned.shape, dtype=torch.float64)
    if kind == "weighted":
        theta = theta + owned.sum(1, keepdim=True).double().log()
    elif kind == "attention":
        squares = torch.zeros_like(theta)
        parts = update.double().split(layout.sizes, 1)
        for number, part in zip(layer_numbers(layout.shapes), parts, strict=True):
            squares[:, number] += part.square().sum(1)
        theta = -squares.sqrt() / temperature
    return layer_weights(theta, owned)


def layer_weights(theta: Tensor, owned: Tensor) -> Tensor:
    """`alpha_i^l = softmax of theta_i^l over the owners of l`, `[C, layers]`; zero for others, and
    for all where nobody owns l. theta = 0 is the simple mean, `log #L_i` the weighted one."""
    chance = theta.masked_fill(~owned, -torch.inf).softmax(0)
    return torch.where(owned, chance, torch.zeros_like(chance))


def traffic(sizes: list[int], owned: Tensor, keep: float) -> tuple[Tensor, Tensor]:
    """Numbers a client receives and sends when layers of these sizes are pruned to `keep` unless
    owned: `down_i = sum_own + keep * sum_others`, `up_i = sum_own`."""
    each = torch.tensor(sizes, dtype=torch.float64)
    up = (owned * each).sum(1)
    return up + keep * (~owned * each).sum(1), up
