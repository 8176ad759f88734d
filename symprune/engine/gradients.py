"""Regional gradients (Wanda++, Yang et al., 2025): how a block's output depends on every weight.

For each sample, the gradient of the l2 norm of the block's output with respect to its matrices,
while the block is dense. What is kept is the sum of its squares over samples, exactly as the norms
of channels are: a `ChannelStats` with a channel for every weight.
"""

from __future__ import annotations

import torch
from torch import nn

from symprune.engine.forward import Activations, Tick
from symprune.errors import SympruneError
from symprune.machine import memory
from symprune.models.layout import device_of
from symprune.models.matrices import Matrix
from symprune.stats import ChannelStats

BYTES = 20  # for a weight: a sum and its rest in fp64, a gradient


def regional_gradients(
    activations: Activations,
    index: int,
    block: nn.Module,
    found: list[Matrix],
    samples: range,
    tick: Tick = lambda _: None,
) -> dict[str, ChannelStats]:
    """By the names of matrices; `norm` of each, as `[out, in]`, is the root mean square over
    samples. A sample passes alone, whatever passes together elsewhere."""
    names = {id(parameter): name for name, parameter in block.named_parameters()}
    inside = {names[id(matrix.parameter)] for matrix in found}
    sums = {
        matrix.name: ChannelStats(matrix.weight.numel(), device=matrix.parameter.device)
        for matrix in found
    }
    for sample in samples:
        alone = activations.only(range(sample, sample + 1))  # leaves nothing for later blocks
        with torch.enable_grad():
            weights = {name: each.detach() for name, each in block.named_parameters()}
            asked = {name: weights[name].requires_grad_() for name in inside}
            output = alone.run(index, block, range(1), weights)
            length = torch.linalg.vector_norm(output.float())
            gradients = torch.autograd.grad(
                length, list(asked.values()), allow_unused=True, materialize_grads=True
            )
        by_name = dict(zip(asked, gradients, strict=True))
        for matrix in found:
            gradient = by_name[names[id(matrix.parameter)]].contiguous()
            sums[matrix.name].add(matrix.slice_of(gradient).reshape(1, -1))
        tick(sample)
    return sums


def check_memory(found: list[Matrix], block: nn.Module) -> str:
    """What a block's gradients take, as a sentence; an error when it is too much."""
    needed, free = (
        BYTES * sum(matrix.weight.numel() for matrix in found),
        memory.free(device_of(block)),
    )
    if needed > free:
        raise SympruneError(
            f"The regional gradients of a block need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB "
            "are free; choose a method without them."
        )
    return f"Regional gradients: {needed / 1e6:,.0f} MB for a block's weights"
