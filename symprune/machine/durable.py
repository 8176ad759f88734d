"""The one way to write what must not be lost: beside its place, onto the disk, then into its place,
and the change of names onto the disk as well. A reader finds the old content or the new."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from symprune.errors import SympruneError
from symprune.validation import parse_json

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def replace_file(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """A file to write that takes the place of `path` at the end, or vanishes if anything fails.
    mode are its permissions, less what the user's umask forbids. What a link points to is replaced,
    not the link; a device or a pipe is written as it is."""
    if path.exists() and (not path.is_file() or path.is_relative_to("/dev")):
        yield path
        return
    path = path.resolve()
    new = new_name(path)
    new.unlink(missing_ok=True)
    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    try:
        yield new
        sync(new)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def new_name(path: Path) -> Path:
    """What a file is called before it takes its place."""
    return path.with_name(f".{path.name}.new")


def write_durably(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Replace a file by these bytes."""
    with replace_file(path) as new, new.open("wb") as file:
        for part in parts:
            file.write(part)


def write_text(path: Path, text: str) -> None:
    """Replace a file by this text."""
    write_durably(path, [text.encode()])


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    mode: int = 0o666,
) -> None:
    """Replace a safetensors file. The same tensors and metadata give the same bytes."""
    from safetensors.torch import save_file

    with replace_file(path, mode) as new:
        save_file(dict(tensors), new, metadata=None if metadata is None else dict(metadata))
        if metadata:
            _sort_metadata(new)
        new.chmod(new.stat().st_mode & mode)


def _sort_metadata(path: Path) -> None:
    """Put what a safetensors file says about itself in order: the library leaves it in any."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def check_file(path: Path | None, begins: bytes = b"") -> None:
    """Fail before any work where a file cannot be written, or where one is that begins otherwise
    than what would be written: it is somebody else's."""
    if path is None:
        return
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise SympruneError(f"Cannot write {path}: it is not a file in a folder that exists.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise SympruneError(f"Cannot write {path}: permission denied.")
    if begins and path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            found = file.read(len(begins))
        if found != begins:
            raise SympruneError(f"Cannot write {path}: it holds something else; choose another.")


def take_room(file: int, size: int) -> None:
    """Make a file of this size, with its room on the disk: one that is only promised would end the
    process where the disk is full when a memory map of it is written."""
    if hasattr(os, "posix_fallocate") and size:
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, in place of one that was cut short."""
    whole = path.read_bytes() if path.exists() else b""
    with path.open("ab") as file:
        file.truncate(whole.rfind(b"\n") + 1)
        file.write(line.encode() + b"\n")
    sync(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file's content, or the names in a folder, on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        # There are file systems that have no way to sync a folder, and do it on their own.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(opened)


def sync_tree(folder: Path) -> None:
    """Have a folder and everything in it on the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def explain(output: Path, error: BaseException, again: str = "") -> BaseException:
    """One sentence for output that could not be written; any other error as it is.

    again says how to go on, where part of the output is kept.
    """
    if isinstance(error, SympruneError):
        return error  # names its own culprit
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "No space left on device" in str(error):
        state = f"is not finished; make room and {again}" if again else "was not written"
        return SympruneError(f"The disk is full: {output} {state}.")
    if isinstance(error, OSError):
        said = f"{error.strerror or error}; {again}" if again else error.strerror or error
        return SympruneError(f"The output {output} cannot be written: {said}.")
    return error
