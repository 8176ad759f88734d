"""Folders beside an output that is in the making: marked as ours, held by one process, and removed
when they are left over.

A stranger may have put something else in their place. Only a folder with the mark, of this user and
without links in it, is written into, emptied or removed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from symprune.errors import SympruneError
from symprune.machine import durable

LOCK = "lock"
MARK = b"A run of symprune that is not finished.\n"
"""What the lock of a work folder says."""
FOLDER = "folder"
NEW, OLD = "new", "old"
SWAP = 2  # renameat2's RENAME_EXCHANGE


@contextmanager
def hold(work: Path, output: Path) -> Iterator[None]:
    """A work folder for `output`, new or left by an earlier run, while this process writes it."""
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
        _make(work)
        lock = os.open(work / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise durable.explain(output, error) from error
    try:
        if not _take(lock):
            raise SympruneError(f"Another process is writing {output}.")
        _mark(lock, work, output)
        yield
    finally:
        os.close(lock)


@contextmanager
def temporary(output: Path, kind: str) -> Iterator[Path]:
    """A folder inside a work folder of its own, which is gone at the end."""
    work = Path(tempfile.mkdtemp(prefix=_prefix(output, kind), dir=output.parent))
    try:
        with hold(work, output):
            (work / FOLDER).mkdir()
            yield work / FOLDER
    finally:
        remove(work)


def remove_left_over(output: Path) -> None:
    """Remove what a process that was killed left of `output`. An old output that was moved away and
    not replaced yet is put back."""
    beginnings = tuple(_prefix(output, kind) for kind in (NEW, OLD))
    for work in sorted(output.parent.iterdir()):
        if work.name.startswith(beginnings) and _is_ours(work) and not _is_held(work):
            moved = work / FOLDER
            if work.name.startswith(beginnings[1]) and moved.is_dir() and not output.exists():
                moved.rename(output)
            remove(work)


def clear(work: Path) -> None:
    """Remove all but the lock."""
    for path in work.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def remove(work: Path) -> None:
    """Remove a work folder as far as possible. The lock goes last: without it, what is left of a
    folder would be anybody's, and refuse the next run."""
    with suppress(OSError):
        clear(work)
        (work / LOCK).unlink(missing_ok=True)
        work.rmdir()


def swap(one: Path, other: Path) -> bool:
    """Let two folders change places, at once; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    here = -100  # AT_FDCWD
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), SWAP) == 0)


def _prefix(output: Path, kind: str) -> str:
    return f".{output.name}.{kind}."


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _mark(lock: int, work: Path, output: Path) -> None:
    """Say whose folder it is, or leave none."""
    try:
        if os.fstat(lock).st_size == 0:
            os.write(lock, MARK)
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise durable.explain(output, error) from error


def _make(work: Path) -> None:
    """A sentence if there is something that may be anybody else's."""
    try:
        work.mkdir()
    except FileExistsError:
        if not _is_ours(work):
            raise SympruneError(
                f"{work} was not left by a run of symprune; move it out of the way."
            ) from None


def _is_ours(work: Path) -> bool:
    if work.is_symlink() or not work.is_dir() or work.stat().st_uid != os.geteuid():
        return False
    return _is_marked(work) and not any(path.is_symlink() for path in work.rglob("*"))


def _is_marked(work: Path) -> bool:
    """Whether a folder says that it is a work folder; one that is empty may become one."""
    names = {path.name for path in work.iterdir()}
    lock = work / LOCK
    content = lock.read_bytes() if lock.is_file() and not lock.is_symlink() else b""
    return content == MARK or (names <= {LOCK} and not content)


def _is_held(work: Path) -> bool:
    """Whether a process is at work in it; one without a lock has only just begun."""
    try:
        lock = os.open(work / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        return not _take(lock)
    finally:
        os.close(lock)
