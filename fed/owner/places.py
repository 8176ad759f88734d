"""Whose data a name stands for, and where they are: one name a file, however it is spelled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from symprune.calibration import SOURCES
from symprune.corpus import hub, mixture


def is_public(text: str) -> bool:
    """Whether calibration text is of published sets alone, by their names. All else is its owner's:
    a file, a column of one, a data set of the hub, and any mixture with one of these."""
    return all(part.source in SOURCES for part in mixture.parse(text))


def places_of(data: str) -> tuple[str, ...]:
    """The files and folders behind the name of a training set or a calibration text, each by its
    whole path without links and by what the disk calls it; what is on no disk, by its name."""
    found: list[str] = []
    for part in mixture.parse(data):
        files = [file for file in _files(part.source) if _exists(file)]
        found += [place for file in files for place in _names(file)]
        if not files and part.source not in SOURCES:
            found.append(_without_details(part.source))
    return tuple(dict.fromkeys(found))


def overlap(one: Iterable[str], other: Iterable[str]) -> bool:
    """Whether two sets of places have data in common: a file, or a folder and what is in it. What
    is nowhere may be anywhere."""
    mine, theirs = set(one), set(other)
    if not mine or not theirs:
        return True
    return any(_within(a, theirs) for a in mine) or any(_within(b, mine) for b in theirs)


def _within(place: str, others: set[str]) -> bool:
    above = (str(folder) for folder in Path(place).parents) if Path(place).is_absolute() else ()
    return place in others or any(folder in others for folder in above)


def _files(source: str) -> Iterator[Path]:
    """What of `libsvm:rows.txt`, `rows.jsonl:answer` or `code.py:function` may be a file."""
    without_kind = source.partition(":")[2]
    for name in (source, without_kind):
        yield Path(name)
        yield Path(name.rpartition(":")[0])


def _without_details(source: str) -> str:
    """A data set of the hub without its column, code without its function."""
    kind, _, rest = source.partition(":")
    return f"{hub.PREFIX}{rest.partition(':')[0]}" if source.startswith(hub.PREFIX) else kind


def _exists(file: Path) -> bool:
    try:
        return str(file) != "." and file.exists()
    except (OSError, ValueError):  # longer than a name can be, or with a zero in it
        return False


def _names(file: Path) -> tuple[str, str]:
    known = file.stat()
    return str(file.resolve()), f"{known.st_dev}:{known.st_ino}"
