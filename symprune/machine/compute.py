"""The type a model is computed in, where that is not the type it is stored in.

Checkpoints are stored in 16 bits. A CPU without instructions for such numbers multiplies them many
times more slowly than 32-bit ones, so there blocks are computed in fp32. Every 16-bit number is one
in fp32 too: what is written is what was read.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symprune.errors import SympruneError
from symprune.validation import check_choice

CHOICES = ("auto", "float32", "bfloat16", "float16")
INSTRUCTIONS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16"},
}
"""What a CPU calls its instructions for products of a type; `bf16` is ARM's name."""


def pick(asked: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The type to compute in: as asked for, else fp32 on a CPU that is slow in the stored one."""
    check_choice("compute-dtype", asked, CHOICES)
    if asked != "auto":
        return getattr(torch, asked)  # type: ignore[no-any-return]
    return torch.float32 if device.type == "cpu" and not multiplies(stored) else stored


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products of such numbers."""
    wanted = INSTRUCTIONS.get(dtype)
    return wanted is None or not wanted.isdisjoint(cpu_features())


@cache
def cpu_features(told: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """What the system says this CPU can do; nothing where it does not say."""
    try:
        lines = told.read_text().splitlines()
    except OSError:
        return frozenset()
    parts = (line.partition(":") for line in lines)
    found = (words for name, _, words in parts if name.strip() in ("flags", "Features"))
    return frozenset(word for words in found for word in words.split())


def describe(compute: torch.dtype, stored: torch.dtype, device: torch.device) -> str:
    """`float32, since this CPU has no instructions for bfloat16`"""
    if compute == stored or device.type != "cpu" or multiplies(stored):
        return name_of(compute)
    return f"{name_of(compute)}, since this CPU has no instructions for {name_of(stored)}"


def cast(model: nn.Module, dtype: torch.dtype, to: torch.dtype) -> dict[str, torch.dtype]:
    """Turn what a model has in `dtype` into `to`; what has another type keeps it. The names of what
    was turned, with the type it had."""
    turned: dict[str, torch.dtype] = {}
    for prefix, module in model.named_modules() if dtype != to else ():
        for leaf, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and tensor.dtype == dtype:
                tensor.data = tensor.data.to(to)
                turned[f"{prefix}.{leaf}" if prefix else leaf] = dtype
    return turned


def widen(model: Any, asked: str, device: torch.device) -> dict[str, torch.dtype]:
    """Have a loaded model compute in the type `pick` picks, if that holds every number of its own:
    for those who compare models to the bit, and save what they loaded."""
    stored = model.dtype
    found = pick(asked, stored, device)
    if found not in (stored, torch.float32):
        raise SympruneError(
            "The parties of federated pruning compare their models to the bit: compute in "
            f"{name_of(stored)} or float32, not in {name_of(found)}."
        )
    return cast(model, stored, found)


def restore(model: Any, turned: dict[str, torch.dtype]) -> None:
    """Undo `cast`."""
    for name, dtype in turned.items():
        path, _, leaf = name.rpartition(".")
        tensor = getattr(model.get_submodule(path), leaf)
        tensor.data = tensor.data.to(dtype)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
