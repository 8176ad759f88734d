"""A device that is not there, to run on a machine without one what must run on an accelerator.

Its tensors keep their numbers in main memory, so every figure is that of the CPU, but they say that
they are elsewhere: an operation on tensors of both places fails as it would on CUDA, with CUDA's
exceptions, and what would make the host wait for the device is counted.

    with PretendDevice() as device:
        model = device.take(model)
        symprune.prune(model, tokens)
    print(device.waits)
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# A kind of device that every build of torch lets tensors be on, and that nothing here uses.
DEVICE = torch.device("lazy", 0)
aten = torch.ops.aten
MOVES = (aten._to_copy, aten.copy_, aten.copy)
BY_INDEX = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
FILLS = (aten.masked_fill, aten.masked_fill_, aten.fill, aten.fill_)
# What returns a size or a number that depends on the data: the host waits for it.
WAITS = (
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount,
    aten._unique2, aten.unique_dim, aten.unique_consecutive, aten._linalg_check_errors,
    aten.repeat_interleave,
)  # fmt: skip


class OnDevice(Tensor):
    """A tensor that is on the device, and `inner`, where its numbers really are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    def __init__(self, inner: Tensor) -> None:
        """All is done in `__new__`."""

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.inner})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})


class PretendDevice:
    """The device, there as long as the context lasts.

    waits counts what makes the host wait, by the line that asked for it; uploads counts copies from
    the host, which need not.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.uploads: Counter[str] = Counter()
        self._open = ExitStack()

    def __enter__(self) -> PretendDevice:
        self._open.enter_context(_Operations(self))
        self._open.enter_context(_Methods())
        # Parameters that change their device are made anew: these cannot be changed in place.
        replaced = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._open.callback(torch.__future__.set_overwrite_module_params_on_conversion, replaced)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def take(self, model: nn.Module) -> Any:
        """A copy of a model, on the device."""
        copy: Any = deepcopy(model).to(DEVICE)
        copy.tie_weights()
        return copy

    @property
    def own_waits(self) -> int:
        """How often the project itself made the host wait, not the model it ran."""
        return sum(n for line, n in self.waits.items() if line.startswith("symprune."))

    def count(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> None:
        """Note an operation that makes the host wait, or that brings something to the device."""
        packet, counter = func.overloadpacket, None
        if packet in MOVES:
            # What is copied comes last; it goes to where the first argument is, or as it is told.
            from_device = isinstance(tensors[-1], OnDevice)
            target = torch.device(kwargs.get("device") or tensors[0].device)
            if from_device != (target.type == DEVICE.type):
                counter = self.waits if from_device else self.uploads
        elif any(isinstance(tensor, OnDevice) for tensor in tensors):
            waits = packet in WAITS or (packet in BY_INDEX and _looks_for_places(args))
            counter = self.waits if waits else None
        if counter is not None:
            counter[f"{_asked_by()} {packet.__name__}"] += 1


def _asked_by() -> str:
    """The line that asked for an operation: the innermost one outside torch and this file."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        inside = module.split(".")[0] in ("torch", __name__)
        if not inside and not function.startswith("__torch_"):
            break
    return f"{module}.{function}:{frame.f_lineno}"


def _looks_for_places(args: Any) -> bool:
    """Whether a tensor is indexed by a mask on the device: its places have to be known first. A
    single number under a mask is filled in without."""
    given = [index for index in args[1] if index is not None]
    masks = [index for index in given if index.dtype in (torch.bool, torch.uint8)]
    values = args[2] if len(args) > 2 else None
    plain = values is not None and values.numel() == 1 and not isinstance(values, OnDevice)
    return any(isinstance(mask, OnDevice) for mask in masks) and not (plain and len(given) == 1)


class _Operations(TorchDispatchMode):
    """Sees every operation on every tensor."""

    def __init__(self, device: PretendDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.device.count(func, _tensors(args, dict(kwargs)), args, kwargs)
        return run(func, args, kwargs)


class _Methods(TorchFunctionMode):
    """What torch does not let a tensor of a class of its own decide by its operations."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.data_ptr:
            return _inside(args[0]).data_ptr()
        if func is Tensor.tolist:
            return args[0].cpu().tolist()
        if func is Tensor.new_tensor:
            like = args[0]
            made = torch.tensor(*args[1:], **{"dtype": like.dtype, **kwargs, "device": "cpu"})
            return made.to(kwargs.get("device", like.device))
        if func in (torch.tensor, torch.as_tensor) and "device" in kwargs:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is F.scaled_dot_product_attention:  # else another kernel, and other roundings
            return run(func, args, kwargs)
        return func(*args, **kwargs)


def run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """An operation, where its tensors are; on the numbers inside."""
    tensors = _tensors(args, dict(kwargs))
    _check_together(func, tensors, args)
    there = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, OnDevice)}
    on_device, told = bool(there), dict(kwargs)
    if told.get("device") is not None:
        on_device = torch.device(told["device"]).type == DEVICE.type
        told["device"] = torch.device("cpu") if on_device else told["device"]
    inside, told = _each(_inside, args), _each(_inside, told)
    if func is aten.histc.default and not inside[0].is_floating_point():  # CPUs have none
        found = func(inside[0].float(), *inside[1:], **told).to(inside[0].dtype)
    else:
        found = func(*inside, **told)

    def outside(value: Any) -> Any:
        if not on_device or not isinstance(value, Tensor):
            return value
        known = there.get(id(value))
        return OnDevice(value) if known is None else known

    return _each(outside, found)


def _tensors(*values: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(*value)
        elif isinstance(value, dict):
            found += _tensors(*value.values())
    return found


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Nested lists, tuples and dictionaries with everything in them changed."""
    if isinstance(value, list | tuple):
        return type(value)([_each(change, item) for item in value])
    if isinstance(value, dict):
        return {key: _each(change, item) for key, item in value.items()}
    return change(value)


def _inside(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value


def _check_together(func: Any, tensors: list[Tensor], args: Any) -> None:
    """Fail as CUDA does when tensors of two places meet.

    Allowed are copies, indices on the CPU into a tensor on the device, and single numbers on the
    CPU, where each number of the result is made of one of each operand.
    """
    packet = getattr(func, "overloadpacket", func)
    meet = [*args[:1], *args[2:3]] if packet in BY_INDEX else tensors
    here = [each for each in meet if isinstance(each, Tensor) and not isinstance(each, OnDevice)]
    if packet in MOVES or not here or not any(isinstance(each, OnDevice) for each in tensors):
        return
    one_by_one = torch.Tag.pointwise in getattr(func, "tags", ()) or packet in (*BY_INDEX, *FILLS)
    into_the_host = packet.__name__.endswith("_") and not isinstance(args[0], OnDevice)
    if not one_by_one or into_the_host or any(each.dim() for each in here):
        raise RuntimeError(
            f"{packet.__name__}: expected all tensors to be on the same device, but found at least "
            f"two devices, {DEVICE} and {here[0].device}!"
        )
