"""The one way to write a file that must not be lost: beside its place, onto the disk, then into its
place, and the change of names onto the disk as well."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_durably(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Replace a file by these bytes; after a power cut it has the old content or the new."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sync_tree(folder: Path) -> None:
    """Have a folder and all files in it on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
