"""The two ends of a model, its embeddings and its head, which no block has: rounded, not pruned."""

from __future__ import annotations

import torch
from torch import nn

from symprune.values.grid import Grid, OnGrid, fetch
from symprune.values.scales import round_to_grid


def head_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of the embeddings and the head by name; one where both are the same."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    ends = {id(module.weight) for module in modules if module is not None}
    return {name: each for name, each in model.named_parameters() if id(each) in ends}


@torch.no_grad()
def round_head(model: nn.Module, grid: Grid) -> dict[str, OnGrid]:
    """Put both ends of a model in memory on a grid, each weight to the nearest of it."""
    found = {}
    for name, parameter in head_parameters(model).items():
        found[name] = round_to_grid(parameter.data, grid)
        parameter.copy_(found[name].dense())
    return fetch(found)
