"""LoRA on a pruned language model: low-rank changes that keep its zeros.

A matrix is used, and merged, as `W + keep * (alpha/rank B A)`: what the mask prunes stays zero, and
what was trained is what is merged. A and B come from peft; the base model is frozen and never sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.fed.problems.models.module_loss import own_randomness

ADAPTER = "default"  # the name peft gives an adapter that has none


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
    with own_randomness(seed, torch.device("cpu")):
        try:
            adapted = peft.get_peft_model(model, config)
        except ValueError as error:
            raise SympruneError(f"LoRA does not fit the model: {error}".rstrip(".") + ".") from None
    for name, layer in _adapted_layers(adapted):
        keep = (masks or {}).get(f"{name}.weight")
        if keep is not None:
            _check_pruned(name, layer.base_layer.weight, keep)
            layer.register_buffer("keep", keep.to(layer.base_layer.weight.device), persistent=False)
            layer.forward = _MaskedForward(layer)
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


def change(layer: Any) -> Tensor:
    """What an adapter adds to its matrix."""
    product = layer.lora_B[ADAPTER].weight @ layer.lora_A[ADAPTER].weight
    scaled: Tensor = product * layer.scaling[ADAPTER]
    keep = getattr(layer, "keep", None)
    return scaled if keep is None else scaled * keep


class _MaskedForward:
    """A layer's forward pass with the masked change. It finds the layer's parameters when it is
    called, so they may be those of `functional_call`."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        base = self.layer.base_layer
        return F.linear(x, base.weight + change(self.layer), base.bias)


def _adapted_layers(adapted: Any) -> list[tuple[str, Any]]:
    """The layers with an adapter, by the names they had in the base model."""
    _peft()
    from peft.tuners.lora import Linear

    base = adapted.get_base_model()
    return [(name, layer) for name, layer in base.named_modules() if isinstance(layer, Linear)]


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
