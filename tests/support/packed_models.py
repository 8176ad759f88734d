"""Tiny models with zeros and codes for their weights, as pruning would leave them."""

from __future__ import annotations

from typing import Any

import families
import torch
from torch import Tensor

from symprune.runtime.blob import FLOATS
from symprune.runtime.layers import cast_packed
from symprune.runtime.pack_model import pack_model
from symprune.runtime.packable import BLOCKS, packable
from symprune.values.grid import GRIDS, OnGrid

GROUP = 64


def pruned(family: str = "llama", sparsity: float = 0.5, seed: int = 0) -> Any:
    """A model whose blocks have zeros at random."""
    return prune_at_random(families.model(family, seed), sparsity, seed)


def prune_at_random(model: Any, sparsity: float = 0.5, seed: int = 0) -> Any:
    """Set some of what can be packed of the blocks to zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, packing in packable(model).items():
        if packing.part == BLOCKS:
            weight = model.get_parameter(name).data
            weight[torch.rand(weight.shape, generator=generator) < sparsity] = 0
    return model


def packed(family: str = "llama", kind: str = "float32", around: bool = False) -> Any:
    """The same, packed with values of `kind`; the embedding and the head in int8 or floats."""
    model, codes = pruned(family), {}
    if kind in FLOATS:
        for name, packing in packable(model).items():
            if packing.part == BLOCKS or around:
                weight = model.get_parameter(name)
                weight.data = weight.data.to(FLOATS[kind])
        pack_model(model, around=around)
        cast_packed(model, FLOATS[kind], torch.float32)
        return model
    for name, packing in packable(model).items():
        if packing.part == BLOCKS or around:
            of_this = kind if packing.part == BLOCKS else "int8"
            weights = packing.pieces(model.get_parameter(name).data)
            for matrix, weight in zip(packing.matrices, weights, strict=True):
                codes[matrix] = rounded(weight, of_this)
    pack_model(model, codes)
    return model


def rounded(weight: Tensor, kind: str) -> OnGrid:
    """The nearest levels, with scales that reach the largest weight of each group."""
    rows, columns = weight.shape
    groups = -(-columns // GROUP)
    wide = torch.zeros(rows, groups * GROUP)
    wide[:, :columns] = weight
    grid = GRIDS[kind]
    scales = (wide.view(rows, groups, GROUP).abs().amax(2) / grid.most).bfloat16()
    scales[scales == 0] = 1
    steps = weight / scales.float().repeat_interleave(GROUP, 1)[:, :columns]
    levels = steps.round().clamp(grid.least, grid.most)
    if not grid.zero:
        levels[levels == 0] = 1
    codes = grid.codes(levels)
    return OnGrid(codes, scales, grid)
