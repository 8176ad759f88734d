"""Packed models in transformers: `from_pretrained` makes them, `save_pretrained` writes them.

The only file of this room that imports transformers. `register.py` has it imported when
transformers looks for the ways it can load a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from symprune.errors import SympruneError
from symprune.machine import memory
from symprune.runtime.blob import packed_name, parameter_name
from symprune.runtime.layers import pack_parameter, packed_parameters
from symprune.runtime.layout import VERSION
from symprune.runtime.packable import BLOCKS, guard_name, packable
from symprune.runtime.unpack_model import rename_ties, unpack_model

METHOD = "symprune"


class SympruneConfig(QuantizationConfigMixin):
    """`quantization_config` in a packed model's config.json; what else is there is kept."""

    def __init__(self, quant_method: str = METHOD, format: int = VERSION, **others: Any) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]
        self.format = format
        vars(self).update(others)


class SympruneQuantizer(HfQuantizer):
    """Loads and saves models whose weights are packed and stay so."""

    requires_calibration = True  # a packed model is made by symprune, not while it is loaded
    is_trainable = True  # adapters on top of it are

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        found = getattr(self.quantization_config, "format", None)
        if found != VERSION:
            raise SympruneError(
                f"The model is packed in format {found}; this symprune reads format {VERSION}."
            )

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Iterable[str] | None = None, **kwargs: Any
    ) -> Any:
        stored = _stored_shapes(checkpoint_files)
        packed = _places(model, stored)
        if not packed:
            raise SympruneError("The model's files hold no packed weights that belong to it.")
        ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
        needed = _of_blocks(model) - packed.keys() - ties.keys()
        for pair in ties.items():
            size = next((packed[name] for name in pair if name in packed), None)
            if size is not None:
                packed |= dict.fromkeys(pair, size)
        for name, size in packed.items():
            path, _, leaf = name.rpartition(".")
            blob = torch.empty(size, dtype=torch.uint8, device="meta")
            pack_parameter(model.get_submodule(path), leaf, blob, name)
        missing = needed - _loaded_names(model, stored) if needed else None
        if missing:
            raise SympruneError(f"The model's files have no weights for {min(missing)}.")
        _settle(model, packed)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        guards = {rf"(^|\.){re.escape(name)}$" for name in packed if name in stored}
        known = model._keys_to_ignore_on_load_unexpected
        kind = set if isinstance(known, set) else list  # as releases of transformers have it
        model._keys_to_ignore_on_load_unexpected = kind([*(known or ()), *guards])
        return model

    def update_weight_conversions(self, weight_conversions: Any, *_: Any) -> Any:
        """transformers' rules for other names are for what is not packed."""
        for rule in weight_conversions:
            pattern = getattr(rule, "compiled_sources", None)
            if pattern is not None:
                rule.compiled_sources = re.compile(rf"(?!.*[._]packed$)(?:{pattern.pattern})")
        return weight_conversions

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        packed, shapes = packed_parameters(model), vars(self).pop("_shapes", {})
        blobs = {packed_name(name) for name in packed}
        for name, parameter in model.named_parameters():
            shape = shapes.get(name, parameter.shape)
            if name not in blobs and parameter.shape != shape:
                raise SympruneError(
                    f"{name} is {tuple(parameter.shape)} in the model's files, "
                    f"{tuple(shape)} by its configuration."
                )
        for module, leaf in packed.values():
            if not module.get_parameter(packed_name(leaf)).is_meta:
                module.blob(leaf)  # what is on disk until it is used is checked then
        memory.return_free_pages()
        _settle_loaded(model)
        return model

    def get_state_dict_and_metadata(self, model: Any, *_: Any) -> tuple[dict[str, Tensor], dict]:
        state = model.state_dict()
        state[guard_name(packed_parameters(model))] = torch.empty(0)
        return state, {}

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        unpack_model(model)
        model._weight_conversions = None  # and is saved as its family is
        return model


def register(auto: Any) -> None:
    """Make the method known to transformers, whose `quantizers.auto` this is."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = SympruneConfig
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = SympruneQuantizer


def adopt(model: Any) -> None:
    """Make a model that was packed in memory one that transformers knows to be packed."""
    packed = set(packed_parameters(model))
    _settle(model, packed)
    _settle_loaded(model)
    model.config.quantization_config = SympruneConfig()
    model.hf_quantizer = SympruneQuantizer(model.config.quantization_config)
    model.quantization_method = METHOD


def _settle(model: Any, packed: Iterable[str]) -> None:
    """What goes by parameters' names goes by those of the packed ones."""
    rename_ties(model, {name: packed_name(name) for name in packed})
    # One expert at a time, not all of a layer: only those are expanded that tokens go to.
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def _settle_loaded(model: Any) -> None:
    model._weight_conversions = []  # a packed model is saved under the names it has in memory
    model.is_quantized = False  # transformers would refuse `half` and `float`, which work


def _stored_shapes(checkpoint_files: Iterable[str] | None) -> dict[str, list[int]]:
    """The tensors in a model's files, by name."""
    shapes: dict[str, list[int]] = {}
    for path in checkpoint_files or ():
        if not str(path).endswith(".safetensors"):
            raise SympruneError(f"A packed model is in safetensors files, {path} is none.")
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is not a dictionary)
                shapes[key] = file.get_slice(key).get_shape()
    return shapes


def _places(model: Any, stored: Mapping[str, list[int]]) -> dict[str, int]:
    """The model's parameters that are packed in its files, with their bytes. As everywhere in
    transformers, a model without a head takes the weights of one with a head, and the reverse."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    prefix = f"{model.base_model_prefix}."
    found: dict[str, int] = {}
    for key, shape in stored.items():
        if not key.endswith((".packed", "_packed")):
            continue
        name = parameter_name(key)
        for candidate in (name, name.removeprefix(prefix), f"{prefix}{name}"):
            if candidate in parameters:
                found[candidate] = math.prod(shape)
                break
    return found


def _of_blocks(model: nn.Module) -> set[str]:
    """The parameters without which the model would not be the one that was packed."""
    try:
        return {name for name, packing in packable(model).items() if packing.part == BLOCKS}
    except SympruneError:  # not a model that could have been pruned
        return set()


def _loaded_names(model: Any, stored: Iterable[str]) -> set[str]:
    """The model's parameters that plain tensors in its files become."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    rules: Any = deepcopy(get_model_conversion_mapping(model))
    known = model.state_dict()
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    others = [rule for rule in rules if not isinstance(rule, WeightRenaming)]
    prefix = model.base_model_prefix
    found = {rename_source_key(key, renamings, others, prefix, known)[0] for key in stored}
    return found | set(stored)
