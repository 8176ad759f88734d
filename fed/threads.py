"""A fixed number of threads for torch and for numpy's BLAS.

One is the default of every run: sums are then added in one order, so the bits do not depend on the
machine's load or core count, and the many small products of a federation run faster than with a
thread team that has to be woken for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


@contextmanager
def limited_threads(count: int = 1) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(count):
            yield
    finally:
        torch.set_num_threads(before)
