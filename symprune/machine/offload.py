"""Hidden states on disk: a memory-mapped file that has no name and goes when the process goes."""

from __future__ import annotations

import math
import mmap
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.machine import durable


def allocate_in(folder: Path) -> Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]:
    """Makes tensors whose memory is a file in `folder`; the system writes it out when it needs the
    room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise SympruneError(
            f"Hidden states cannot be kept in {folder}: {error.strerror}."
        ) from error

    def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                durable.take_room(file.fileno(), size)
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise SympruneError(
                f"{size / 1e9:.1f} GB of hidden states cannot be kept in {folder}: "
                f"{error.strerror}."
            ) from error
        return torch.frombuffer(mapped, dtype=dtype).view(shape)

    return allocate
