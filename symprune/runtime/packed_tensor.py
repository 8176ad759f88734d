"""What model code sees as a packed module's weight: a tensor that is expanded when it must be.

Its shape, type and device are known without. Products with it, look-ups in it, one matrix of a
stack and turning it round go on from the packed form; any other operation gets the dense tensor
for as long as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from symprune.errors import SympruneError
from symprune.runtime.blob import Layout
from symprune.runtime.product import expand, product, rows_of


class PackedTensor(Tensor):
    """A packed parameter, or one matrix of it.

    piece: which matrix of a stack, None for all. turned: seen as `[in, out]`. flat: a stack seen
    with its matrices one below the other.
    """

    blob: Tensor
    packed_layout: Layout
    piece: int | None
    turned: bool
    flat: bool
    _is_hf_initialized = True  # transformers has nothing to fill in

    @staticmethod
    def __new__(
        cls,
        blob: Tensor,
        layout: Layout,
        dtype: torch.dtype,
        piece: int | None = None,
        turned: bool = False,
        flat: bool = False,
    ) -> PackedTensor:
        shape: tuple[int, ...] = (layout.rows, layout.columns)
        shape = shape[::-1] if turned else shape
        if layout.pieces and piece is None:
            shape = (layout.pieces * shape[0], shape[1]) if flat else (layout.pieces, *shape)
        made: PackedTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=dtype, device=blob.device
        )
        made.blob, made.packed_layout, made.piece = blob, layout, piece
        made.turned, made.flat = turned, flat
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """All is done in `__new__`."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedTensor({self.packed_layout.kind}, {tuple(self.shape)}, {self.dtype})"

    @property
    def is_matrix(self) -> bool:
        """Whether it is a single matrix, not a stack."""
        return not self.packed_layout.pieces or self.piece is not None

    def like(self, **changes: Any) -> PackedTensor:
        """The same weights, seen another way."""
        seen = {name: getattr(self, name) for name in ("piece", "turned", "flat", "dtype")}
        return PackedTensor(self.blob, self.packed_layout, **{**seen, **changes})

    @torch.compiler.disable
    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ weight.T + bias`, whichever way round this is."""
        return product(self.blob, self.packed_layout, x, piece=self.piece or 0, bias=bias)

    @torch.compiler.disable
    def dense(self) -> Tensor:
        """The weights in full."""
        pieces = range(self.packed_layout.pieces) if not self.is_matrix else (self.piece or 0,)
        made = [expand(self.blob, self.packed_layout, self.dtype, piece) for piece in pieces]
        made = [piece.T if self.turned else piece for piece in made]
        if self.is_matrix:
            return made[0]
        return torch.cat(made) if self.flat else torch.stack(made)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _PACKED:
            found = _PACKED[func](*args, **kwargs)
            if found is not NotImplemented:
                return found
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _refuse_change(func, [*args, *kwargs.values()])
        return func(*_dense(args), **_dense(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*_dense(args), **_dense(dict(kwargs or {})))


def _dense(value: Any) -> Any:
    """Nested lists, tuples and dictionaries with every packed tensor in them expanded."""
    if isinstance(value, PackedTensor):
        return value.dense()
    if isinstance(value, list | tuple):
        made = [_dense(item) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, dict):
        return {key: _dense(item) for key, item in value.items()}
    return value


def _refuse_change(func: Any, given: list[Any]) -> None:
    """What would be written into the dense copy would be lost."""
    name = getattr(func, "__name__", "")
    into = name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))
    if into and given and isinstance(given[0], PackedTensor):
        raise SympruneError(
            "The weights of a packed model cannot be changed in place; "
            "model.dequantize() gives a model whose weights can."
        )


def _linear(x: Any, weight: Any, bias: Tensor | None = None) -> Any:
    if not _fits(x, weight, turned=False) or not weight.is_matrix:
        return NotImplemented
    return weight.times(x, bias)


def _matmul(x: Any, weight: Any) -> Any:
    if not _fits(x, weight, turned=True):
        return NotImplemented
    if weight.is_matrix:
        return weight.times(x)
    if weight.flat or x.dim() != 3 or len(x) != len(weight):
        return NotImplemented
    return torch.stack([weight.like(piece=each).times(x[each]) for each in range(len(x))])


def _addmm(bias: Tensor, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if not _fits(x, weight, turned=True) or beta != 1 or alpha != 1 or bias.dim() != 1:
        return NotImplemented
    return weight.times(x, bias)


def _fits(x: Any, weight: Any, turned: bool) -> bool:
    plain = isinstance(x, Tensor) and not isinstance(x, PackedTensor)
    return plain and isinstance(weight, PackedTensor) and weight.turned == turned


@torch.compiler.disable
def _embedding(
    indices: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not _fits(indices, weight, turned=False) or not weight.is_matrix or max_norm is not None:
        return NotImplemented
    return rows_of(weight.blob, indices, weight.dtype)


def _item(weight: Any, index: Any) -> Any:
    number = isinstance(index, int) and not isinstance(index, bool)
    if isinstance(index, Tensor):
        number = index.dim() == 0 and not index.is_floating_point() and index.dtype != torch.bool
    if not number or not isinstance(weight, PackedTensor) or weight.is_matrix or weight.flat:
        return NotImplemented
    return weight.like(piece=range(len(weight))[int(index)])


def _view(weight: PackedTensor, *shape: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if isinstance(sizes, torch.dtype) or weight.is_matrix:
        return NotImplemented
    wanted = torch.empty(weight.shape, device="meta").view(sizes).shape
    for seen in (weight.like(flat=False), weight.like(flat=True)):
        if seen.shape == wanted:
            return seen
    return NotImplemented


def _turn(weight: PackedTensor, first: int = -2, second: int = -1) -> Any:
    last = {weight.dim() - 1, weight.dim() - 2}
    if weight.flat or {first % weight.dim(), second % weight.dim()} != last:
        return NotImplemented
    return weight.like(turned=not weight.turned)


def _turn_matrix(weight: PackedTensor) -> Any:
    return _turn(weight) if weight.dim() == 2 else NotImplemented


def _to(weight: PackedTensor, *args: Any, **kwargs: Any) -> Any:
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device != weight.device:
        return NotImplemented
    return weight.like(dtype=dtype or weight.dtype)


def _want_gradient(weight: PackedTensor, wanted: bool = True) -> Any:
    return NotImplemented if wanted else weight


_PACKED: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.bmm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    F.embedding: _embedding,
    Tensor.__getitem__: _item,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.transpose: _turn,
    Tensor.transpose: _turn,
    Tensor.t: _turn_matrix,
    torch.t: _turn_matrix,
    Tensor.T.__get__: _turn_matrix,  # type: ignore[attr-defined]
    Tensor.mT.__get__: _turn,  # type: ignore[attr-defined]
    Tensor.to: _to,
    Tensor.detach: lambda weight: weight,
    Tensor.data.__get__: lambda weight: weight,  # type: ignore[attr-defined]
    Tensor.requires_grad_: _want_gradient,
    Tensor.requires_grad.__set__: _want_gradient,  # type: ignore[attr-defined]
}
# What is known without the numbers.
_ABOUT: set[Any] = {
    getattr(Tensor, name).__get__
    for name in (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad", "grad_fn",
        "is_meta", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_sparse", "is_quantized", "itemsize",
        "is_nested",
    )
} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__,
    Tensor.ndimension, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device,
    torch.is_floating_point, torch.numel, torch.is_complex,
}  # fmt: skip
