"""A packed model in memory made plain again, in place: with its values dequantised."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from symprune.runtime.blob import packed_name
from symprune.runtime.layers import packed_parameters, unpack_parameter


def unpack_model(model: nn.Module) -> None:
    """Put plain weights, dequantised, in the place of all packed ones."""
    made: dict[int, nn.Parameter] = {}
    packed = packed_parameters(model)
    for module, leaf in packed.values():
        blob = module.blob(leaf)[0]
        unpack_parameter(module, leaf, made.get(id(blob)))
        made[id(blob)] = module.get_parameter(leaf)
    rename_ties(model, {packed_name(name): name for name in packed})


def rename_ties(model: nn.Module, names: Mapping[str, str]) -> None:
    """Have transformers tie parameters under other names: its models list them in attributes."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for attribute in ("all_tied_weights_keys", "_tied_weights_keys"):
            ties = getattr(module, attribute, None)
            if isinstance(ties, dict) and ties:
                pairs = [[_renamed(name, prefix, names) for name in pair] for pair in ties.items()]
                setattr(module, attribute, dict(pairs))


def _renamed(name: str, prefix: str, names: Mapping[str, str]) -> str:
    return names.get(f"{prefix}{name}", f"{prefix}{name}").removeprefix(prefix)
