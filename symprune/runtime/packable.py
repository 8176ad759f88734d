"""Which parameters of a model can be packed, and how: by structure, on a model with or without
weights. What is pruned can be packed; the embedding and the head can be as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from symprune.models.layout import find_layout

BLOCKS, EMBEDDING, HEAD = "blocks", "embedding", "head"


@dataclass(frozen=True)
class Packing:
    """How one parameter is packed.

    name is the parameter's, shape its own. matrices are the names of the matrices it is made of, in
    order, as masks and records have them: itself, or the pieces it is stacked of (then `stacked`).
    transposed: a piece is stored as `[in, out]`. part is blocks, embedding or head. tied are the
    names of other parameters that are this one.
    """

    name: str
    shape: tuple[int, ...]
    matrices: tuple[str, ...]
    transposed: bool = False
    stacked: bool = False
    part: str = BLOCKS
    tied: tuple[str, ...] = ()

    def pieces(self, whole: Tensor) -> list[Tensor]:
        """The matrices as `[out, in]`, of a tensor laid out like the parameter: views."""
        stored = [whole]
        if self.stacked:
            stored = list(whole.view(len(self.matrices), -1, whole.shape[-1]))
        return [piece.T if self.transposed else piece for piece in stored]


def packable(model: nn.Module) -> dict[str, Packing]:
    """The parameters that can be packed, by name, in the model's order.

    Those of the blocks are the ones that are pruned. The input embedding and the head come with
    `part` saying so; a head that is the embedding is not named twice but is among its `tied`.
    """
    found = {**_of_blocks(model), **_around(model)}
    order = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name: found[name] for name in order if name in found}


def guard_name(packed_parameters: Iterable[str]) -> str:
    """The packed parameter under whose own name a packed checkpoint has an empty tensor.

    transformers that has not heard of symprune leaves out what it does not know and fills the
    weights with random numbers; over a tensor of the wrong shape it stops.
    """
    return min(packed_parameters)


def _of_blocks(model: nn.Module) -> dict[str, Packing]:
    grouped: dict[str, list[Any]] = {}
    for matrix in find_layout(model).all_matrices():
        grouped.setdefault(matrix.parameter_name, []).append(matrix)
    return {
        name: Packing(
            name,
            tuple(found[0].parameter.shape),
            tuple(matrix.name for matrix in found),
            transposed=found[0].transposed,
            stacked=found[0].piece is not None,
        )
        for name, found in grouped.items()
    }


def _around(model: nn.Module) -> dict[str, Packing]:
    """The embedding and the head, each under one name."""
    found: dict[str, Packing] = {}
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for part, name, weight in _embeddings(model):
        source = ties.get(name, name)
        same = next((n for n, p in found.items() if n == source or _is(model, p.name, weight)), "")
        if same:
            known = found[same]
            found[same] = Packing(**{**vars(known), "tied": (*known.tied, name)})
        else:
            found[name] = Packing(name, tuple(weight.shape), (name,), part=part)
    return found


def _is(model: nn.Module, name: str, weight: nn.Parameter) -> bool:
    return model.get_parameter(name) is weight


def _embeddings(model: Any) -> Iterator[tuple[str, str, nn.Parameter]]:
    """The input embedding and the head where they are plain tables and linear layers."""
    kinds = ((EMBEDDING, "get_input_embeddings", nn.Embedding),
             (HEAD, "get_output_embeddings", nn.Linear))  # fmt: skip
    for part, find, kind in kinds:
        try:
            module = getattr(model, find)()
        except (AttributeError, NotImplementedError):
            continue
        path = next((path for path, m in model.named_modules() if m is module), None)
        if path is not None and isinstance(module, kind):
            yield part, f"{path}.weight", module.get_parameter("weight")
