"""Where a model's named tensors lie in the flat vector that algorithms see.

With masks that vector has the kept weights alone: what is pruned is nowhere, so no algorithm can
train it, send it or remember it. Tensors keep their names and shapes; `sizes` count what is kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.masks import pack_bits


@dataclass(frozen=True)
class FlatLayout:
    """Where each named tensor lies in the flat parameter vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """How many weights of every tensor are in the vector."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def dimension(self) -> int:
        return sum(self.sizes)

    @property
    def whole(self) -> FlatLayout:
        """The layout of all weights, kept or not."""
        return self

    @property
    def digest(self) -> str:
        """Tells masks apart; empty without masks."""
        return ""

    def slices(self) -> dict[str, slice]:
        ends = np.cumsum([0, *self.sizes]).tolist()
        return {name: slice(ends[i], ends[i + 1]) for i, name in enumerate(self.names)}

    def split(self, w: Tensor) -> dict[str, Tensor]:
        """`w [..., d]` as named tensors `[..., *shape]`, zero where a weight is not kept."""
        whole = self.whole
        parts = self.scatter(w).split(whole.sizes, dim=-1)
        return {
            name: part.view(*w.shape[:-1], *shape)
            for name, shape, part in zip(whole.names, whole.shapes, parts, strict=True)
        }

    def join(self, parts: dict[str, Tensor]) -> Tensor:
        """The flat vector of one set of named tensors."""
        return self.gather(torch.cat([parts[name].reshape(-1) for name in self.names]))

    def gather(self, w: Tensor) -> Tensor:
        """The kept of all weights, along the last dimension; a vector of those stays as it is."""
        return w

    def scatter(self, w: Tensor) -> Tensor:
        """All weights from the kept ones, zero elsewhere; a vector of all stays as it is."""
        return w

    def gather_part(self, number: int, values: Tensor) -> Tensor:
        """`values [..., prod(shape)]` of one tensor's weights, for those that are kept."""
        return values


@dataclass(frozen=True)
class KeptLayout(FlatLayout):
    """The same when only the weights at `positions` of the whole vector are kept."""

    digest: str = ""
    positions: Tensor = field(default_factory=lambda: torch.empty(0), compare=False, repr=False)

    @property
    def whole(self) -> FlatLayout:
        return FlatLayout(self.names, self.shapes)

    @cached_property
    def starts(self) -> list[int]:
        """Where the kept weights of every tensor begin, and where the last ones end."""
        ends = torch.tensor(np.cumsum([0, *self.whole.sizes]))
        return torch.searchsorted(self.positions, ends).tolist()

    @cached_property
    def sizes(self) -> list[int]:  # type: ignore[override]
        return np.diff(self.starts).tolist()

    def gather(self, w: Tensor) -> Tensor:
        if w.shape[-1] == len(self.positions):
            return w
        return w.index_select(-1, self.positions.to(w.device))

    def scatter(self, w: Tensor) -> Tensor:
        d = self.whole.dimension
        if w.shape[-1] == d:
            return w
        if w.dim() == 2 and len(w) > 1 and w.stride(0) == 0:  # one model for all clients
            return self.scatter(w[0]).expand(len(w), -1)
        out = w.new_zeros(*w.shape[:-1], d)
        return out.index_copy_(-1, self.positions.to(w.device), w)

    def gather_part(self, number: int, values: Tensor) -> Tensor:
        before = sum(self.whole.sizes[:number])
        begin, end = self.starts[number : number + 2]
        return values.index_select(-1, (self.positions[begin:end] - before).to(values.device))


def keep_layout(layout: FlatLayout, masks: Mapping[str, Tensor]) -> KeptLayout:
    """The layout of the weights these masks keep; tensors without a mask are kept whole."""
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    for name in masks:
        if name not in shapes:
            known = ", ".join(layout.names[:8]) + (", ..." if len(layout.names) > 8 else "")
            raise SympruneError(f"The model has no parameter {name} for the mask; it has {known}.")
    check, parts = hashlib.sha256(), []
    for name, shape in shapes.items():
        if name not in masks:
            parts.append(torch.ones(math.prod(shape), dtype=torch.bool))
            continue
        keep = masks[name]
        if tuple(keep.shape) != shape or keep.dtype != torch.bool:
            raise SympruneError(
                f"The mask of {name} is {keep.dtype} {tuple(keep.shape)}, the parameter {shape}."
            )
        keep = keep.cpu().flatten()
        check.update(f"{name} {shape} ".encode() + pack_bits(keep).numpy().tobytes())
        parts.append(keep)
    kept = torch.cat(parts)
    if not bool(kept.any()):
        raise SympruneError("The masks keep no weight of the model.")
    positions = kept.nonzero().squeeze(1)
    return KeptLayout(layout.names, layout.shapes, check.hexdigest()[:32], positions)
