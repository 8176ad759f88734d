"""Wanda's masks, found without the walk: whole forwards of the model, with hooks on its layers.

Every block is measured by running the whole model, pruned up to there, sample by sample; the sums
of squares come from what the block's own modules were given. Slow and simple: a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from symprune.masks import keep_by_row
from symprune.models.layout import find_layout
from symprune.models.matrices import Matrix, is_experts

Sums = dict[str, Tensor]
OTHERWISE_CALLED = ("DbrxExpertGLU", "InklingSharedExperts")
"""Experts whose forward is not given what the other families' are."""


@torch.no_grad()
def masks(
    model: nn.Module, tokens: Tensor, sparsity: float = 0.5, *, otherwise: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The keep-mask of every matrix whose input a hook can see, by the matrix's name.

    The model is pruned with them on the way; matrices no hook can see get the masks in otherwise.
    """
    layout, found = find_layout(model), dict[str, Tensor]()
    for index, block in enumerate(layout.blocks):
        sums = _measure(model, block, f"{layout.prefix}.{index}", tokens)
        for matrix in layout.matrices(index):
            keep = matrix.slice_of(otherwise[matrix.parameter_name])
            if matrix.name in sums:
                keep = found[matrix.name] = _mask(matrix, sums[matrix.name], sparsity)
            matrix.apply(keep)
    return found


def _mask(matrix: Matrix, squares: Tensor, sparsity: float) -> Tensor:
    weight = matrix.weight.float().abs()
    return keep_by_row(weight * squares[: weight.shape[1]].float().sqrt(), sparsity)


def _measure(model: nn.Module, block: nn.Module, prefix: str, tokens: Tensor) -> Sums:
    sums: Sums = {}

    def add(name: str, x: Tensor) -> None:
        if x.numel():
            squares = x.double().reshape(-1, x.shape[-1]).square().sum(0)
            sums[name] = sums.get(name, 0) + squares

    handles = []
    for path, module in block.named_modules():
        name = f"{prefix}.{path}"
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            handles.append(module.register_forward_pre_hook(_linear(f"{name}.weight", add)))
        elif type(module).__name__ == "DbrxExperts" or (
            is_experts(module) and type(module).__name__ not in OTHERWISE_CALLED
        ):
            handles.append(module.register_forward_pre_hook(_experts(name, add)))
        if path.rpartition(".")[2] == "x_proj" and type(block).__name__ == "MambaBlock":
            handles.append(module.register_forward_hook(_time_step(name, add)))
    for row in tokens:
        model(input_ids=row[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return sums


def _linear(name: str, add: Callable[[str, Tensor], None]) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...]) -> None:
        groups = getattr(module, "n_groups", 1)
        if groups == 1:
            add(name, args[0])
        else:
            for group in range(groups):
                add(f"{name}.{group}", args[0][..., group, :])

    return hook


def _time_step(name: str, add: Callable[[str, Tensor], None]) -> Callable[..., None]:
    """Mamba multiplies the first channels of what x_proj makes by dt_proj's weight."""

    def hook(module: Any, args: tuple[Any, ...], out: Tensor) -> None:
        block = name.removesuffix("x_proj")
        add(f"{block}dt_proj.weight", out)

    return hook


def _experts(name: str, add: Callable[[str, Tensor], None]) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...]) -> None:
        for expert, x in _routed(module, args).items():
            if hasattr(module, "weight"):
                add(f"{name}.weight.{expert}", x)
            elif type(module).__name__ == "DbrxExperts":
                add(f"{name}.mlp.w1.{expert}", x)
                add(f"{name}.mlp.v1.{expert}", x)
                glu, shape = module.mlp, (module.num_experts, -1, x.shape[1])
                gate, up = x @ glu.w1.view(shape)[expert].T, x @ glu.v1.view(shape)[expert].T
                add(f"{name}.mlp.w2.{expert}", glu.activation_fn(gate) * up)
            else:
                first = "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"
                add(f"{name}.{first}.{expert}", x)
                if type(module).__name__ == "LongcatFlashExperts":
                    gate, up = (x @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
                    add(f"{name}.down_proj.{expert}", module.act_fn(gate) * up)
                elif first == "up_proj":
                    add(f"{name}.down_proj.{expert}", module.act_fn(x @ module.up_proj[expert].T))
                elif type(module).__name__ == "Llama4TextExperts":
                    gate, up = (x @ module.gate_up_proj[expert]).chunk(2, dim=-1)
                    add(f"{name}.down_proj.{expert}", up * module.act_fn(gate))
                elif len(x) and hasattr(module, "_apply_gate") and first == "gate_up_proj":
                    weight = getattr(module, first)[expert]
                    y = x @ (weight if module.is_transposed else weight.T)
                    if module.has_bias:
                        y = y + module.gate_up_proj_bias[expert]
                    add(f"{name}.down_proj.{expert}", module._apply_gate(y))

    return hook


def _routed(module: Any, args: tuple[Any, ...]) -> dict[int, Tensor]:
    """The tokens each expert is given."""
    if len(args) == 1:  # all tokens to all experts, zeros where they are not for them
        split = args[0].view(module.gate_up_proj.shape[0], -1, args[0].shape[-1])
        return dict(enumerate(split))
    if isinstance(args[1], list):  # sorted by expert, with their numbers
        return dict(enumerate(args[0].split(args[1])))
    hidden = args[0].reshape(-1, args[0].shape[-1])
    index = args[1].reshape(len(hidden), -1)
    computed = getattr(module, "num_routed_experts", int(index.max()) + 1)
    return {e: hidden[(index == e).any(1)] for e in range(computed)}
