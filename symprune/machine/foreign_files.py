"""Names and links in folders that others made: what a file says another is called is a plain name,
and what a folder holds is in it.

A cache of the hub keeps a model's files in `blobs` and has links to them in `snapshots/COMMIT`;
these are followed too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from symprune.errors import SympruneError

LONGEST_NAME = 255


def check_file_names(names: Iterable[Any], ending: str, said_by: Path) -> None:
    """Refuse names, said by a file, that are not those of files beside it."""
    for name in names:
        plain = (
            isinstance(name, str)
            and name.endswith(ending)
            and len(name.encode(errors="replace")) <= LONGEST_NAME
            and name.isprintable()
            and not name.startswith(".")
            and not set(name) & set("/\\:")
        )
        if not plain:
            raise SympruneError(
                f"{said_by} names {str(name)[:80]!r}, which is not a {ending} file beside it."
            )


def check_links(folder: Path, deep: bool = False) -> None:
    """Refuse a folder with a link to what is outside of it. deep: in its subfolders, too."""
    real = folder.resolve()
    allowed = [real]
    if real.parent.name == "snapshots":
        allowed.append(real.parent.parent / "blobs")
    for path in _links(folder, deep):
        target = path.resolve()
        if not any(target.is_relative_to(place) for place in allowed):
            raise SympruneError(
                f"{path} is a link to {target}, outside of its folder; put the file itself there."
            )


def _links(folder: Path, deep: bool) -> Iterator[Path]:
    paths = folder.rglob("*") if deep else folder.iterdir()
    return (path for path in paths if path.is_symlink())
