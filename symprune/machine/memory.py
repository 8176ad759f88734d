"""What the process holds of the machine's memory, and giving back what it no longer needs."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import torch

from symprune.machine import capacity

MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD
LARGE = 2**20
BUSY_TOKENS = 8192
WIDEST = 24  # copies of the hidden states a block's intermediate results come to, generously


def return_large_blocks() -> None:
    """Have glibc give every freed block of a megabyte or more back to the system at once.

    Left alone it raises that threshold to 32 MB as such blocks come and go, and keeps holes between
    the tensors of a streamed model that add up to more than a block.
    """
    _call_glibc("mallopt", MMAP_THRESHOLD, LARGE)


def return_free_pages() -> None:
    """Have glibc give back the free pages between its smaller blocks: left alone, they grow in
    number with every decoder block that comes and goes."""
    _call_glibc("malloc_trim", 0)


def _call_glibc(name: str, *arguments: int) -> None:
    """Nothing where there is no such function."""
    if sys.platform == "linux":
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*arguments)


def now() -> int:
    """Bytes held now: of the accelerator if one is in use, else resident."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return int(torch.cuda.memory_allocated())
    return _resident() or _most_resident()


def free(device: torch.device) -> int:
    """Bytes that can still be had there; of other devices than CUDA's, what the machine
    has, within the limits of its control group."""
    if device.type != "cuda":
        return capacity.free_memory()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def batch_size(device: torch.device, seqlen: int, width: int, dtype: torch.dtype) -> int:
    """How many samples should pass a block together: enough tokens to keep an accelerator busy, if
    their activations take no more than half of the free memory; on a CPU one at a time, which is
    no slower there."""
    if device.type == "cpu" or seqlen == 0:
        return 1
    fits = free(device) // (2 * WIDEST * seqlen * width * dtype.itemsize)
    return max(1, min(fits, BUSY_TOKENS // seqlen))


def peak() -> int:
    """The most bytes the process has held: of the accelerator if one is in use."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return int(torch.cuda.max_memory_allocated())
    return max(_most_resident(), _resident())


def _resident() -> int:
    """0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.is_file() else 0


def _most_resident() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
