"""The matrices of a decoder block that are pruned, found by structure.

Prunable are `nn.Linear`, GPT-2's `Conv1D` (stored transposed), linear layers that multiply groups
of channels each by rows of their own, and experts fused into one parameter. Embeddings, norms,
biases, convolutions, routers and gates of one output are never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from symprune.errors import SympruneError

ROUTER_NAMES = ("gate", "router", "gating", "shared_expert_gate")
EXPERT_COUNTS = ("num_experts", "moe_num_experts", "num_local_experts", "total_experts")


@dataclass(frozen=True)
class Matrix:
    """One prunable matrix: a parameter, or one of the equal pieces a parameter is stacked of.

    piece is its number among `pieces`. Of a parameter of three dimensions that is the first index,
    of one of two dimensions they are runs of rows. transposed: stored as `[in, out]`.
    """

    name: str
    parameter_name: str
    kind: str
    parameter: nn.Parameter
    transposed: bool = False
    piece: int | None = None
    pieces: int = 1

    @property
    def weight(self) -> Tensor:
        """The matrix as `[out, in]`: a view, whatever the storage order."""
        return self.slice_of(self.parameter.data)

    def slice_of(self, whole: Tensor) -> Tensor:
        """This matrix's part, as `[out, in]`, of a tensor laid out like the parameter: a view."""
        stored = whole
        if self.piece is not None:
            stored = whole.view(self.pieces, -1, whole.shape[-1])[self.piece]
        return stored.T if self.transposed else stored

    @property
    def part(self) -> str:
        """`attn` or `mlp`, from the names of the modules around it."""
        return "attn" if "attn" in self.name.lower() or "attention" in self.name.lower() else "mlp"

    def apply(self, keep: Tensor) -> None:
        """Set every weight to zero that `keep` (`[out, in]`) does not keep."""
        self.weight.masked_fill_(~keep.to(self.parameter.device), 0)


def matrices(block: nn.Module, prefix: str = "") -> list[Matrix]:
    """The prunable matrices of a block, in order; names start with `prefix`."""
    found: list[Matrix] = []
    routers = _routers(block)
    for path, module in block.named_modules():
        where = ".".join(part for part in (prefix, path) if part)
        if hasattr(module, "packed_slots"):
            raise SympruneError(
                "The weights of this model are packed; model.dequantize(), symprune unpack or "
                "symprune.load(..., dequantize=True) gives one that can be pruned."
            )
        if isinstance(module, nn.Linear):
            if path not in routers and module.out_features > 1:
                found.extend(_linear(module, where, path))
        elif is_conv1d(module):
            name = f"{where}.weight"
            weight = module.get_parameter("weight")
            found.append(Matrix(name, name, kind_of(path), weight, transposed=True))
        elif is_experts(module):
            found.extend(_experts(module, where, path))
    for matrix in found:
        if not matrix.parameter.is_floating_point():
            raise SympruneError(
                f"{matrix.name} is quantised ({matrix.parameter.dtype}); "
                "load the model in 16 or 32 bits to prune it."
            )
    return found


def is_conv1d(module: nn.Module) -> bool:
    """GPT-2's `Conv1D`: a linear layer that stores `[in, out]` and is not an `nn.Linear`."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_experts(module: nn.Module) -> bool:
    """Whether experts are fused into this module's own parameters.

    A parameter of three dimensions alone does not say so: the kernel of a depthwise convolution
    and the gates of a recurrent layer have three as well.
    """
    own = list(module.parameters(recurse=False))
    if "expert" not in type(module).__name__.lower() or isinstance(module, nn.Linear):
        return False
    count = _expert_count(module)
    return any(p.dim() == 3 or (p.dim() == 2 and count and p.shape[0] % count == 0) for p in own)


def _expert_count(module: nn.Module) -> int:
    """How many experts a module has; 0 where it does not say."""
    for name in EXPERT_COUNTS:
        count = getattr(module, name, None)
        if isinstance(count, int) and count > 0:
            return count
    return 0


def _linear(module: nn.Linear, where: str, path: str) -> Iterator[Matrix]:
    """A linear layer; as many as it has groups where each group has inputs and rows of its own."""
    name, kind, weight = f"{where}.weight", kind_of(path), module.get_parameter("weight")
    groups = getattr(module, "n_groups", 1)
    if type(module).forward is nn.Linear.forward or not isinstance(groups, int) or groups < 2:
        yield Matrix(name, name, kind, weight)
        return
    for group in range(groups):
        yield Matrix(f"{name}.{group}", name, kind, weight, False, group, groups)


def _experts(module: nn.Module, where: str, path: str) -> Iterator[Matrix]:
    fused = {leaf: p for leaf, p in module.named_parameters(recurse=False) if p.dim() == 3}
    if fused:
        transposed = dict.fromkeys(fused, _is_transposed(module, list(fused.values())))
        counts = {leaf: parameter.shape[0] for leaf, parameter in fused.items()}
    else:
        # Experts one below the other. The last of them leads back to the width of the others'
        # inputs, which is how wide all of them are stored: its rows are its inputs.
        fused = {leaf: p for leaf, p in module.named_parameters(recurse=False) if p.dim() == 2}
        counts = dict.fromkeys(fused, _expert_count(module))
        transposed = {leaf: leaf == list(fused)[-1] for leaf in fused}
    for leaf, parameter in fused.items():
        name, kind = f"{where}.{leaf}", kind_of(f"{path}.{leaf}")
        for number in range(counts[leaf]):
            yield Matrix(
                f"{name}.{number}", name, kind, parameter, transposed[leaf], number, counts[leaf]
            )


def _is_transposed(module: nn.Module, fused: list[nn.Parameter]) -> bool:
    """Whether experts are stored as `[expert, in, out]`.

    Most say so themselves. For the others the shapes do: what leads into an expert is twice as wide
    as what leads out of it, since the gate lies beside it, on the side of its outputs.
    """
    said = getattr(module, "is_transposed", None)
    if said is not None or len(fused) != 2:
        return bool(said)
    (_, rows, columns), (_, back_rows, back_columns) = (p.shape for p in fused)
    return rows == back_columns and columns == 2 * back_rows


def _routers(block: nn.Module) -> set[str]:
    """The paths of the linear layers whose output picks experts.

    They stand beside the experts and have an output for each of them, or are called routers.
    """
    routers: set[str] = set()
    for path, module in block.named_modules():
        beside = {name: child for name, child in module.named_children() if _holds(name, child)}
        if not beside:
            continue
        counts = {count for child in beside.values() for count in _counts(child)}
        for below, layer in module.named_modules():
            inside = below.split(".")[0] in beside
            if isinstance(layer, nn.Linear) and not inside:
                called = below.rpartition(".")[2] in ROUTER_NAMES
                if called or layer.out_features in counts:
                    routers.add(".".join(part for part in (path, below) if part))
    return routers


def _holds(name: str, module: nn.Module) -> bool:
    """Whether a module is a set of experts (not a single one that all tokens share)."""
    if "shared" in name:
        return False
    return name.endswith("experts") or type(module).__name__.endswith("Experts")


def _counts(experts: nn.Module) -> set[int]:
    """How many experts there may be: those computed, and with those that cost nothing."""
    if isinstance(experts, nn.ModuleList):
        return {len(experts)}
    inside = [p.shape[0] for p in experts.parameters() if p.dim() == 3]
    return {count for count in (*inside, *map(_expert_count, experts.modules())) if count}


def kind_of(path: str) -> str:
    """What tables group by: `self_attn.q_proj`, `mlp.down_proj`, `experts.down_proj`, ..."""
    return ".".join([part for part in path.split(".") if not part.isdigit()][-2:])
