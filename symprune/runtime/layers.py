"""Modules whose weights stay packed: linear layers, embeddings, experts.

A module keeps its class, its hooks and its other parameters. In the place of a weight it has the
blob, and what asks for the weight gets a `PackedTensor`. A blob is checked before its first use, so
that no damaged file can make a kernel read outside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.runtime.blob import Layout, packed_name, read_panels
from symprune.runtime.packed_tensor import PackedTensor
from symprune.runtime.product import checked, product
from symprune.runtime.tiles import PANEL

SAMPLED = 8
"""Panels looked at to say how sparse a matrix is."""


@dataclass(frozen=True)
class _Slot:
    """A parameter that is packed: its name in the model, what it looked like, and what is in the
    blob that was seen last."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None = None


class PackedModule(nn.Module):
    """What all packed modules have in common."""

    dense_class: ClassVar[type[nn.Module]]
    packed_slots: dict[str, _Slot]

    def blob(self, leaf: str = "weight") -> tuple[Tensor, Layout]:
        """The blob in the place of a parameter and what it holds, checked."""
        slot = self.packed_slots[leaf]
        blob = self._parameters["packed" if leaf == "weight" else packed_name(leaf)]
        assert blob is not None
        try:
            layout = checked(blob)
            if layout is not slot.layout:
                _check_shape(layout, slot)
                self.packed_slots[leaf] = replace(slot, layout=layout)
        except SympruneError as error:
            raise SympruneError(f"{slot.name}: {error}") from error
        return blob, layout

    def __getattr__(self, name: str) -> Any:
        slots = self.__dict__.get("packed_slots", {})
        return self._seen(name) if name in slots else super().__getattr__(name)

    @torch.compiler.disable
    def _seen(self, leaf: str) -> Tensor:
        slot, stored = self.packed_slots[leaf], self._parameters[packed_name(leaf)]
        if stored is None or stored.is_meta:
            return torch.empty(slot.shape, dtype=slot.dtype, device="meta")
        blob, layout = self.blob(leaf)
        flat = bool(layout.pieces) and len(slot.shape) == 2
        return PackedTensor(blob, layout, slot.dtype, None, layout.transposed, flat)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for leaf, slot in self.packed_slots.items():
            self.packed_slots[leaf] = replace(
                slot, dtype=fn(torch.empty(0, dtype=slot.dtype)).dtype
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        return (_revive, (self.dense_class,), *made[2:])

    def extra_repr(self) -> str:
        known = [self.dense_class.extra_repr(self)]
        for leaf in self.packed_slots:
            stored = self._parameters[packed_name(leaf)]
            if stored is not None and not stored.is_meta:
                blob, layout = self.blob(leaf)
                bits, sparsity = layout.bits / layout.weights, sampled_sparsity(blob, layout)
                what = "" if leaf == "weight" else f"{leaf}: "
                known.append(f"{what}{layout.kind}, {sparsity:.0%} zeros, {bits:.2f} bits a weight")
        return ", ".join(part for part in known if part)


def _times(module: Any, x: Tensor) -> Tensor:
    """A linear layer's product, without the detour over its weight."""
    blob, layout = module.blob()
    own = module._parameters
    bias = own["bias"] if "bias" in own else module.bias  # noqa: SIM401 (slow to look up)
    return product(blob, layout, x, bias=bias)


# Compiled models stop before it and go on behind: there is nothing in it to compile.
_times_uncompiled = torch.compiler.disable(_times)


class _LinearForward:
    """The forward pass of a linear layer."""

    def forward(self: Any, x: Tensor) -> Tensor:
        # What keeps compilers out takes as long as a small product: only they are to meet it.
        if torch.compiler.is_compiling():
            return _times_uncompiled(self, x)
        return _times(self, x)


@cache
def packed_class(dense: Any) -> Any:
    """The class of packed modules that are otherwise `dense`."""
    plain = dense.forward is nn.Linear.forward or dense.__name__ == "Conv1D"
    bases = (_LinearForward, PackedModule, dense) if plain else (PackedModule, dense)
    names = {"dense_class": dense, "__module__": __name__}
    return type(f"Packed{dense.__name__}", bases, names)


PackedLinear = packed_class(nn.Linear)
PackedEmbedding = packed_class(nn.Embedding)


def _revive(dense: Any) -> Any:
    """An empty packed module, for what copies and pickles."""
    made = packed_class(dense)
    return made.__new__(made)


def pack_parameter(
    module: Any, leaf: str, blob: Tensor | None = None, name: str | None = None
) -> None:
    """Put a blob in the place of a module's parameter; without one, a place where it is loaded.
    name is what the parameter is called in the model, for messages."""
    weight = module._parameters.pop(leaf)
    assert weight is not None
    if not isinstance(module, PackedModule):
        dense: Any = type(module)
        module.__class__ = packed_class(dense)
        module.packed_slots = {}
    if blob is None:
        blob = torch.empty(0, dtype=torch.uint8, device="meta")
    if not isinstance(blob, nn.Parameter):
        blob = nn.Parameter(blob, requires_grad=False)
    module.packed_slots[leaf] = _Slot(name or leaf, tuple(weight.shape), weight.dtype)
    module.register_parameter(packed_name(leaf), blob)


def unpack_parameter(module: PackedModule, leaf: str, weight: nn.Parameter | None = None) -> None:
    """Put the dense weight back in its place: expanded, or the one given."""
    if weight is None:
        seen = module._seen(leaf)
        dense = seen.dense().contiguous() if isinstance(seen, PackedTensor) else seen
        weight = nn.Parameter(dense, requires_grad=False)
    del module.packed_slots[leaf], module._parameters[packed_name(leaf)]
    if not module.packed_slots:
        del module.__dict__["packed_slots"]
        module.__class__ = module.dense_class  # type: ignore[assignment]
    module.register_parameter(leaf, weight)


def packed_parameters(model: nn.Module) -> dict[str, tuple[PackedModule, str]]:
    """Every packed parameter's name, as it was, with its module and its name there."""
    return {
        ".".join(part for part in (path, leaf) if part): (module, leaf)
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, PackedModule)
        for leaf in module.packed_slots
    }


def cast_packed(model: nn.Module, dtype: torch.dtype, to: torch.dtype) -> None:
    """Have weights that are expanded to `dtype` be expanded to another type."""
    for module, leaf in packed_parameters(model).values():
        slot = module.packed_slots[leaf]
        if slot.dtype == dtype:
            module.packed_slots[leaf] = replace(slot, dtype=to)


def sampled_sparsity(blob: Tensor, layout: Layout) -> float:
    """The share of zeros in some panels of a matrix."""
    if not layout.masked:
        return 0.0
    every = max(layout.all_panels // SAMPLED, 1)
    panels = np.arange(0, layout.all_panels, every)
    keep = read_panels(blob, layout, panels).keep
    assert keep is not None
    rows = [min(PANEL, layout.rows - panel % layout.panels * PANEL) for panel in panels]
    return 1 - float(np.count_nonzero(keep)) / (sum(rows) * layout.columns)


def _check_shape(layout: Layout, slot: _Slot) -> None:
    here = layout.shape
    flat = (here[0] * here[1], here[2]) if len(here) == 3 and len(slot.shape) == 2 else here
    if flat != slot.shape:
        raise SympruneError(f"It is {here} where it is packed, {slot.shape} in the model.")
