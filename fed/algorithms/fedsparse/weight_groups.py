"""Which weights are kept or removed together: all that feed one neuron, or each one alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from symprune.errors import SympruneError

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


@lru_cache(maxsize=8)
def weight_groups(
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    grain: str,
    exempt: tuple[str, ...] = (),
) -> Groups:
    """Groups of a model's flat parameter vector.

    `neuron`: the incoming weights of one output neuron or feature map, with its bias. Layers named
    in `exempt` ("output" is the last one) and tensors without a weight matrix (normalisation) are
    in no group. `weight`: every weight of the other tensors is a group of its own."""
    if grain not in GRAINS:
        raise SympruneError(f"Unknown gates {grain!r}; choose from {', '.join(GRAINS)}.")
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
    of, count = torch.cat(parts), single if grain == "weight" else at
    of = torch.where(of < 0, count, of)
    return Groups(of, count, torch.bincount(of, minlength=count + 1)[:count])


def _layer(name: str) -> str:
    return name.rpartition(".")[0] or name
