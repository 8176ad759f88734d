"""A packed model in memory made plain again, in place: with its values dequantised."""

from __future__ import annotations

from torch import nn

from symprune.runtime.layers import packed_parameters, unpack_parameter


def unpack_model(model: nn.Module) -> None:
    """Put plain weights, dequantised, in the place of all packed ones."""
    made: dict[int, nn.Parameter] = {}
    for module, leaf in packed_parameters(model).values():
        blob = module.blob(leaf)[0]
        unpack_parameter(module, leaf, made.get(id(blob)))
        made[id(blob)] = module.get_parameter(leaf)
