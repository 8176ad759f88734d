"""What a checkpoint on disk looks like: sparsity and pattern per matrix, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from symprune import hub
from symprune.errors import SympruneError
from symprune.masks import count_true, find_pattern
from symprune.models import ROUTER_NAMES, find_layout
from symprune.pack import open_shards
from symprune.support import auto_class

IN_A_BLOCK = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class MatrixFacts:
    """One prunable matrix of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    zeros: int
    size: int
    pattern: str

    @property
    def sparsity(self) -> float:
        return self.zeros / self.size


def inspect_folder(folder: Path, trust_remote_code: bool = False) -> list[MatrixFacts]:
    """Facts about every prunable matrix in a checkpoint's safetensors files, in order of name."""
    if not (folder / "config.json").is_file():
        raise SympruneError(f"The folder {folder} is not a model: it has no config.json.")
    transposed = _transposed_names(folder, trust_remote_code)
    facts = [
        _facts(name, tensor, name in transposed)
        for name, tensor in _tensors(folder)
        if tensor.dim() in (2, 3) and IN_A_BLOCK.search(name) and not _is_router(name)
    ]
    if not facts:
        raise SympruneError(f"{folder} holds no safetensors file with decoder blocks.")
    return sorted(facts, key=lambda fact: _natural(fact.name))


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    shards = open_shards(folder)
    return ((name, shards.read(name)) for name in shards)


def _facts(name: str, tensor: Tensor, transposed: bool) -> MatrixFacts:
    keep = tensor != 0
    zeros = keep.numel() - int(count_true(keep.flatten()))
    if zeros == 0:
        pattern = "dense"
    else:
        pattern = find_pattern(keep.mT if transposed else keep) or "unstructured"
    return MatrixFacts(name, tuple(tensor.shape), zeros, keep.numel(), pattern)


def _is_router(name: str) -> bool:
    return name.removesuffix(".weight").rpartition(".")[2] in ROUTER_NAMES


def _transposed_names(folder: Path, trust_remote_code: bool) -> set[str]:
    """Parameters stored `[in, out]`, found on a model without weights."""
    access = hub.Access(trust_remote_code=trust_remote_code)
    config = hub.load_config(hub.resolve(str(folder), access))
    made_by = auto_class(config, trust_remote_code)
    try:
        with torch.device("meta"):
            model = made_by.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise SympruneError(f"{folder} has a config.json no model is made from: {error}") from error
    return {m.parameter_name for m in find_layout(model).all_matrices() if m.transposed}


def _natural(name: str) -> list[tuple[int, str]]:
    """`layers.2` before `layers.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
