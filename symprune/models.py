"""Where a HuggingFace causal LM keeps its decoder blocks and the matrices in them that are pruned.

Found by structure, not by name: the blocks are the entries of the `nn.ModuleList` that holds most
of the prunable weights; prunable are `nn.Linear`, GPT-2's `Conv1D` (stored transposed) and the
fused three-dimensional expert weights of mixture-of-experts layers. Embeddings, norms, biases,
routers and the language-model head are never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from symprune.errors import SympruneError

ROUTER_NAMES = ("gate", "router", "shared_expert_gate")


@dataclass(frozen=True)
class Matrix:
    """One prunable matrix: a parameter, or one expert's slice of a fused parameter."""

    name: str
    parameter_name: str
    kind: str
    parameter: nn.Parameter
    transposed: bool = False
    expert: int | None = None

    @property
    def stored(self) -> Tensor:
        """The matrix as it lies in the parameter."""
        data = self.parameter.data
        return data if self.expert is None else data[self.expert]

    @property
    def weight(self) -> Tensor:
        """The matrix as `[out, in]`: a view, whatever the storage order."""
        return self.stored.T if self.transposed else self.stored

    @property
    def part(self) -> str:
        """`attn` or `mlp`, from the names of the modules around it."""
        return "attn" if "attn" in self.name.lower() or "attention" in self.name.lower() else "mlp"

    def apply(self, keep: Tensor) -> None:
        """Set every weight to zero that `keep` (`[out, in]`) does not keep."""
        self.weight.masked_fill_(~keep.to(self.parameter.device), 0)


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's `Conv1D`: a linear layer that stores `[in, out]` and is not an `nn.Linear`."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_experts(module: nn.Module) -> bool:
    """Experts fused into three-dimensional parameters."""
    return any(p.dim() == 3 for p in module.parameters(recurse=False))


def _is_router(block: nn.Module, path: str) -> bool:
    parent, _, leaf = path.rpartition(".")
    return leaf in ROUTER_NAMES and hasattr(block.get_submodule(parent), "experts")


def matrices(block: nn.Module, prefix: str = "") -> list[Matrix]:
    """The prunable matrices of a block, in order; names start with `prefix`."""
    found: list[Matrix] = []
    for path, module in block.named_modules():
        where = ".".join(part for part in (prefix, path) if part)
        name, kind = f"{where}.weight", _kind(path)
        if isinstance(module, nn.Linear) and not _is_router(block, path):
            found.append(Matrix(name, name, kind, module.get_parameter("weight")))
        elif is_conv1d(module):
            found.append(Matrix(name, name, kind, module.get_parameter("weight"), transposed=True))
        elif is_experts(module):
            found.extend(_expert_matrices(module, where, path))
    for matrix in found:
        if not matrix.parameter.is_floating_point():
            raise SympruneError(
                f"{matrix.name} is quantised ({matrix.parameter.dtype}); "
                "load the model in 16 or 32 bits to prune it."
            )
    return found


def _expert_matrices(module: nn.Module, where: str, path: str) -> Iterator[Matrix]:
    transposed = bool(getattr(module, "is_transposed", False))
    for leaf, parameter in module.named_parameters(recurse=False):
        if parameter.dim() == 3:
            name, kind = f"{where}.{leaf}", _kind(f"{path}.{leaf}")
            for expert in range(parameter.shape[0]):
                yield Matrix(f"{name}.{expert}", name, kind, parameter, transposed, expert)


def _kind(path: str) -> str:
    """What tables group by: `self_attn.q_proj`, `mlp.down_proj`, `experts.down_proj`, ..."""
    return ".".join([part for part in path.split(".") if not part.isdigit()][-2:])


@dataclass(frozen=True)
class Layout:
    """A model's decoder blocks and the dotted name of the list that holds them."""

    model: nn.Module
    prefix: str
    blocks: nn.ModuleList

    def matrices(self, index: int) -> list[Matrix]:
        return matrices(self.blocks[index], f"{self.prefix}.{index}")

    def all_matrices(self) -> list[Matrix]:
        return [m for index in range(len(self.blocks)) for m in self.matrices(index)]


def find_layout(model: nn.Module) -> Layout:
    """The decoder blocks of `model`: of all module lists not inside another one, the heaviest."""
    best: Layout | None = None
    best_size = 0
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or name.startswith(inside or "\0"):
            continue
        inside = (*inside, f"{name}.")
        distinct = {
            id(m.parameter): m.parameter.numel() for block in module for m in matrices(block)
        }
        if sum(distinct.values()) > best_size:
            best, best_size = Layout(model, name, module), sum(distinct.values())
    if best is None:
        raise SympruneError(
            f"{type(model).__name__} has no decoder blocks that could be found: "
            "no nn.ModuleList in it holds nn.Linear, Conv1D or fused expert weights."
        )
    return best


def device_of(module: nn.Module) -> torch.device:
    """Where a module's parameters are."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))
