"""Where a run lives: what it makes is made on its problem's device.

Algorithms name no device: their formulas make tensors where `working_on` says, so the same lines
run on a CPU and on an accelerator. Numbers of clients may be on either, bytes are in main memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from symprune.errors import SympruneError

P = ParamSpec("P")
T = TypeVar("T")
MAIN_MEMORY = torch.device("cpu")  # where bytes are made and read


def read_device(name: str) -> torch.device:
    """The device of this name, such as cpu or cuda:1, if it is there."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SympruneError(f"Device {name!r} is not available here.") from error


def working_on(device: torch.device) -> AbstractContextManager[object]:
    """Until the context ends, new tensors are on this device. Asking for the one in use is free."""
    return nullcontext() if torch.get_default_device() == device else device


def placed(rows: Tensor | list[Tensor], device: torch.device) -> Tensor | list[Tensor]:
    """A field of a message, on this device."""
    return [row.to(device) for row in rows] if isinstance(rows, list) else rows.to(device)


def cached_per_device(function: Callable[P, T]) -> Callable[P, T]:
    """The last few results of a function are kept, those of every device for themselves."""

    @lru_cache(maxsize=8)
    def kept(device: torch.device, *args: P.args, **options: P.kwargs) -> T:
        return function(*args, **options)

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        return kept(torch.get_default_device(), *args, **options)  # type: ignore[arg-type]

    return call
