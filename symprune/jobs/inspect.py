"""What a checkpoint on disk looks like: sparsity and pattern per matrix, one tensor at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from symprune.checkpoint.packed_shards import open_shards
from symprune.checkpoint.parameter_names import Names, Types, skeleton
from symprune.checkpoint.tensor_files import Shards
from symprune.errors import SympruneError
from symprune.masks import count_true, find_pattern
from symprune.models import hub
from symprune.models.layout import find_layout
from symprune.models.matrices import kind_of


@dataclass(frozen=True)
class MatrixFacts:
    """One prunable matrix of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    zeros: int
    size: int
    pattern: str

    @property
    def kind(self) -> str:
        return kind_of(self.name.removesuffix(".weight"))

    @property
    def sparsity(self) -> float:
        return self.zeros / self.size


def inspect_folder(folder: Path, trust_remote_code: bool = False) -> list[MatrixFacts]:
    """Facts about every prunable matrix in a checkpoint's safetensors files, in order of name."""
    if not (folder / "config.json").is_file():
        raise SympruneError(f"The folder {folder} is not a model: it has no config.json.")
    shards = open_shards(folder)
    if not shards.entries:
        raise SympruneError(f"{folder} holds no safetensors file with decoder blocks.")
    transposed = _prunable(folder, shards, trust_remote_code)
    facts = [_facts(name, shards.read(name), transposed[name]) for name in transposed]
    if not facts:
        raise SympruneError(f"{folder} holds no safetensors file with decoder blocks.")
    return sorted(facts, key=lambda fact: _natural(fact.name))


def _facts(name: str, tensor: Tensor, transposed: bool) -> MatrixFacts:
    keep = tensor != 0
    zeros = keep.numel() - int(count_true(keep.flatten()))
    if zeros == 0:
        pattern = "dense"
    else:
        pattern = find_pattern(keep.mT if transposed else keep) or "unstructured"
    return MatrixFacts(name, tuple(tensor.shape), zeros, keep.numel(), pattern)


def _prunable(folder: Path, shards: Shards, trust_remote_code: bool) -> dict[str, bool]:
    """The tensors that make prunable matrices, and whether they are stored `[in, out]`: found on a
    model without weights."""
    access = hub.Access(trust_remote_code=trust_remote_code)
    config = hub.load_config(hub.resolve(str(folder), access))
    try:
        model = skeleton(config, torch.float32, trust_remote_code)
    except SympruneError:
        raise
    except Exception as error:
        raise SympruneError(f"{folder} has a config.json no model is made from: {error}") from error
    names = Names(model, shards, Types(torch.float32, torch.float32, torch.float32))
    found = {m.parameter_name: m.transposed for m in find_layout(model).all_matrices()}
    # What the model puts together from several tensors is [out, in] in each of them.
    return {
        key: transposed and pattern is None
        for name, transposed in found.items()
        for key, pattern in names.sources.get(name, [])
    }


def _natural(name: str) -> list[tuple[int, str]]:
    """`layers.2` before `layers.10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
