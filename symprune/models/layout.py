"""Where a HuggingFace causal LM keeps its decoder blocks.

Found by structure, not by name: the blocks are the entries of the `nn.ModuleList` that holds most
of the prunable weights of the part that generates text. What is prunable in a block: `matrices`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from symprune.errors import SympruneError
from symprune.models.matrices import Matrix, kind_of, matrices


@dataclass(frozen=True)
class Layout:
    """A model's decoder blocks and the dotted name of the list that holds them.

    shared are the parameters that several blocks have in common: what one block's statistics say
    about them is not what another's do, so they are not pruned. others are module lists of the
    same part of the model with prunable weights of their own, which are not pruned either. weights
    counts those of the whole model.
    """

    model: nn.Module
    prefix: str
    blocks: nn.ModuleList
    shared: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()
    weights: int = 0

    def matrices(self, index: int) -> list[Matrix]:
        found = matrices(self.blocks[index], f"{self.prefix}.{index}")
        return [matrix for matrix in found if matrix.parameter_name not in self.shared]

    def all_matrices(self) -> list[Matrix]:
        return [m for index in range(len(self.blocks)) for m in self.matrices(index)]

    def notes(self) -> list[str]:
        """A sentence for each part of the model that could be expected to be pruned and is not."""
        notes = []
        if self.shared:
            kinds = dict.fromkeys(kind_of(name.removesuffix(".weight")) for name in self.shared)
            notes.append(f"Left dense, shared by several blocks: {', '.join(sorted(kinds))}.")
        if self.others:
            notes.append(f"Left dense, outside {self.prefix}: {', '.join(self.others)}.")
        return notes


def find_layout(model: nn.Module) -> Layout:
    """The decoder blocks of `model`: of all module lists that are not inside another one, in the
    part that generates text, the heaviest."""
    root, part = _text_part(model)
    sizes = _lists(part)
    if not any(sizes.values()) and part is not model:
        root, part, sizes = "", model, _lists(model)
    if not any(sizes.values()):
        raise SympruneError(
            f"{type(model).__name__} has no decoder blocks that could be found: "
            "no nn.ModuleList in it holds nn.Linear, Conv1D or fused expert weights."
        )
    best = max(sizes, key=lambda path: sizes[path])
    blocks = part.get_submodule(best)
    assert isinstance(blocks, nn.ModuleList)
    prefix = f"{root}{best}"
    others = tuple(f"{root}{path}" for path, size in sizes.items() if size and path != best)
    weights = sum(parameter.numel() for parameter in model.parameters())
    return Layout(model, prefix, blocks, _shared(prefix, blocks), others, weights)


def _lists(part: nn.Module) -> dict[str, int]:
    """The module lists that are not inside another one, with the size of what is prunable."""
    sizes: dict[str, int] = {}
    for path, module in part.named_modules():
        if isinstance(module, nn.ModuleList) and not path.startswith(tuple(f"{p}." for p in sizes)):
            distinct = {
                id(m.parameter): m.parameter.numel() for block in module for m in matrices(block)
            }
            sizes[path] = sum(distinct.values())
    return sizes


def _text_part(model: nn.Module) -> tuple[str, nn.Module]:
    """What generates text, with the beginning of its names: of a model that sees or hears as well,
    the language model inside."""
    find = getattr(model, "get_decoder", None)
    decoder = find() if callable(find) else None
    if isinstance(decoder, nn.Module) and decoder is not model:
        for name, module in model.named_modules():
            if module is decoder:
                return f"{name}.", decoder
    return "", model


def _shared(prefix: str, blocks: nn.ModuleList) -> frozenset[str]:
    """The names of the prunable parameters that are in more than one block."""
    owners: Counter[int] = Counter()
    names: dict[str, int] = {}
    for index, block in enumerate(blocks):
        found = {m.parameter_name: id(m.parameter) for m in matrices(block, f"{prefix}.{index}")}
        names |= found
        owners.update(set(found.values()))
    return frozenset(name for name, parameter in names.items() if owners[parameter] > 1)


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))
