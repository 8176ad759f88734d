"""What local training costs: multiply-adds of every layer, and FedSpa's count of training FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn


@torch.no_grad()
def layer_macs(module: nn.Module, shape: tuple[int, ...]) -> dict[str, int]:
    """Multiply-adds of one row in every convolution and linear layer, by the name of its weight."""
    macs: dict[str, int] = {}

    def count(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = layer.get_parameter("weight")
        macs[f"{name}.weight"] = weight.numel() * (output[0].numel() // len(weight))

    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [m.register_forward_hook(partial(count, n)) for n, m in layers]
    try:
        module(torch.zeros(1, *shape))
    finally:
        for hook in hooks:
            hook.remove()
    return macs


def training_flops(
    macs: Mapping[str, int],
    density: Mapping[str, float],
    rows: int,
    epochs: int,
    search_rows: int = 0,
) -> float:
    """FLOPs of one client in one round (FedSpa, Table 1): two a multiply-add, the backward pass
    costs two forward ones, a layer costs its density, and the mask search runs dense."""
    sparse = sum(macs[name] * density.get(name, 1.0) for name in macs)
    return 6 * sparse * epochs * rows + 6 * sum(macs.values()) * search_rows
