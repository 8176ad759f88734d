"""LoRA on a pruned language model: low-rank changes that keep its zeros.

A matrix is used, and merged, as `W + keep * (alpha/rank B A)`: what the mask prunes stays zero, and
what was trained is what is merged. A and B come from peft; the base model is frozen and never sent.
Where a layer stores its matrix transposed, as GPT-2's do, so are its mask and its change.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from symprune.errors import SympruneError
from symprune.fed.problems.models.module_loss import own_randomness

ADAPTER = "default"  # the name peft gives an adapter that has none
PREFIX = "base_model.model."  # before the base model's names
ALPHA = "lora_alpha"  # in the metadata of a file of adapters
PAST_LAYERS = ("x_proj", "dt_proj", "out_proj")  # of a Mamba mixer, whose kernels take matrices


def add_lora(
    model: Any,
    masks: Mapping[str, Tensor] | None = None,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] | str = "all-linear",
    seed: int = 0,
) -> Any:
    """The model with adapters, which alone are trained: a problem's model, as any other.

    model: a HuggingFace model; it is changed. masks: those it was pruned by, a `MaskSet`. rank,
    alpha: the change of a matrix is `alpha/rank B A`. targets: names of the layers that get one,
    such as q_proj. seed: of A; B starts at zero, so nothing changes at first."""
    peft = _peft()
    if rank < 1 or not alpha > 0:
        raise SympruneError(f"rank = {rank} and alpha = {alpha} must be positive.")
    known = dict(model.named_parameters())
    for name in masks or ():
        if name not in known:
            raise SympruneError(f"The model has no parameter {name} for the mask.")
    names = targets if isinstance(targets, str) else list(targets)
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, task_type="CAUSAL_LM")
    with own_randomness(seed, torch.device("cpu")), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # peft sets it by the layer
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError as error:
            raise SympruneError(f"LoRA does not fit the model: {error}".rstrip(".") + ".") from None
    try:
        _check_layers(adapted)
        for name, layer in _adapted_layers(adapted):
            keep = (masks or {}).get(f"{name}.weight")
            if keep is not None:
                weight = layer.base_layer.weight
                _check_pruned(name, weight, keep)
                layer.register_buffer("keep", keep.to(weight.device), persistent=False)
            if keep is not None or _multiplies_its_own_way(layer.base_layer):
                layer.forward = _ChangedForward(layer)
    except SympruneError:
        adapted.unload()  # the model is as it was
        raise
    return adapted


def merge_lora(adapted: Any, parameters: Mapping[str, Tensor] | None = None) -> Any:
    """The base model with its adapters merged in, `W + keep * (alpha/rank B A)`; its zeros stay,
    and all of it can be trained again.

    adapted: what `add_lora` returned. parameters: the adapters' values, such as a result's
    `parameters`; left out, the model's own."""
    given = dict(parameters or {})
    own = dict(adapted.named_parameters())
    for name in given:
        if name not in own:
            raise SympruneError(f"The model has no adapter {name}.")
    with torch.no_grad():
        for name, value in given.items():
            own[name].copy_(value)
        for _, layer in _adapted_layers(adapted):
            layer.base_layer.weight += change(layer)
            layer.lora_B[ADAPTER].weight.zero_()  # merged: it must not count twice
    return adapted.unload().requires_grad_(True)


def about_adapters(loss: Any) -> dict[str, str] | None:
    """What a file of a run's parameters must say beside them, if they are adapters."""
    inner = getattr(loss, "loss", loss)  # behind masks
    config = getattr(getattr(inner, "module", None), "peft_config", {}).get(ADAPTER)
    return None if config is None else {ALPHA: repr(float(config.lora_alpha))}


def change(layer: Any) -> Tensor:
    """What an adapter adds to its matrix, stored as that is."""
    product = layer.lora_B[ADAPTER].weight @ layer.lora_A[ADAPTER].weight
    scaled: Tensor = product * layer.scaling[ADAPTER]
    stored = scaled.T if layer.fan_in_fan_out else scaled
    keep = getattr(layer, "keep", None)
    return stored if keep is None else stored * keep


class _ChangedForward:
    """A layer's own forward pass with the changed matrix. It finds the layer's parameters when it
    is called, so they may be those of `functional_call`."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        base = self.layer.base_layer
        changed = (base.weight + change(self.layer)).to(base.weight.dtype)
        out: Tensor = functional_call(base, {"weight": changed}, (x,))
        return out


def _multiplies_its_own_way(base: nn.Module) -> bool:
    """Whether a linear layer is more than one product, such as one for each group of channels:
    then peft's product of its inputs with A is not what the matrix's change does."""
    return isinstance(base, nn.Linear) and type(base).forward is not nn.Linear.forward


def _adapted_layers(adapted: Any) -> list[tuple[str, Any]]:
    """The layers with an adapter, by the names they had in the base model."""
    _peft()
    from peft.tuners.lora import Linear

    base = adapted.get_base_model()
    return [(name, layer) for name, layer in base.named_modules() if isinstance(layer, Linear)]


def _check_layers(adapted: Any) -> None:
    """Refuse adapters that would not be masked, trained or merged as this file says."""
    from peft.tuners.lora import LoraLayer

    base = adapted.get_base_model()
    linear = {layer for _, layer in _adapted_layers(adapted)}
    uses = Counter(id(tensor) for _, tensor in base.named_parameters(remove_duplicate=False))
    for name, layer in base.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        around, _, own_name = name.rpartition(".")
        module: Any = layer.get_base_layer()
        why = None
        if layer not in linear:
            why = f"is no linear layer but a {type(module).__name__}"
        elif uses[id(module.weight)] > 1:
            why = "shares its matrix with another layer, which would change, too"
        elif own_name in PAST_LAYERS and _is_mamba(base.get_submodule(around)):
            why = "is part of a Mamba mixer, which reads its matrix past the adapter"
        if why is not None:
            raise SympruneError(f"{name} {why}: name other layers in targets.")


def _is_mamba(module: nn.Module) -> bool:
    """Whether a module scans a state space, by the parameters of one."""
    return hasattr(module, "A_log") and hasattr(module, "D")


def _check_pruned(name: str, weight: nn.Parameter, keep: Tensor) -> None:
    if keep.shape != weight.shape or keep.dtype != torch.bool:
        raise SympruneError(
            f"The mask of {name} is {keep.dtype} {tuple(keep.shape)}, the matrix "
            f"{tuple(weight.shape)}."
        )
    if bool(weight.detach()[~keep.to(weight.device)].any()):
        raise SympruneError(f"{name} has weights that its mask prunes; prune the model first.")


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise SympruneError("peft is not installed: pip install 'symprune[lora]'.") from None
    return peft
