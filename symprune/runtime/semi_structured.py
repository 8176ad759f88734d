"""2:4 sparsity in 16 bits on a GPU that multiplies it directly, through PyTorch's own tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.runtime.blob import Layout

KINDS = ("bfloat16", "float16")
CAPABILITY = (8, 0)  # Ampere, the first with sparse tensor cores
ROWS, COLUMNS = 32, 64  # what a matrix must be a multiple of


def fits(layout: Layout, device: torch.device) -> bool:
    """Whether a matrix may be multiplied that way, as far as its header and the device say."""
    if device.type != "cuda" or not has_sparse_cores(device):
        return False
    plain = layout.pieces == 0 and layout.masked and layout.kind in KINDS
    return plain and layout.rows % ROWS == 0 and layout.columns % COLUMNS == 0


def has_sparse_cores(device: torch.device) -> bool:
    """Not on AMD, where torch calls the devices CUDA as well."""
    if torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= CAPABILITY


def is_two_of_four(weight: Tensor) -> bool:
    """Whether no more than two of any four weights in a row are left."""
    return bool(((weight != 0).view(-1, 4).sum(1) <= 2).all())


def convert(weight: Tensor) -> Tensor | None:
    """A matrix as torch keeps it for these cores; None if it is not 2:4 or torch cannot."""
    if not is_two_of_four(weight):
        return None
    try:
        return torch.sparse.to_sparse_semi_structured(weight)
    except (RuntimeError, NotImplementedError, ValueError):
        return None
