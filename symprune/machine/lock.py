"""One process at a time: who works on a folder holds a lock in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """Wait until nobody else, in this process or another, holds this lock; it ends with whoever
    holds it, however that ends. Where the system has no such locks nothing is waited for."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
