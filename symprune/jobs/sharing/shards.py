"""A sweep divided among machines: which cells each does, and their results put together again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from symprune.errors import SympruneError
from symprune.jobs.sweep import check_results, read_results
from symprune.machine import durable

Cell = TypeVar("Cell")
MOST = 100_000
NAMED = re.compile(r"\.(\d+)of(\d+)$")
PASSING = ("seconds",)
"""What is different whenever a cell is done again."""


@dataclass(frozen=True)
class Shard:
    """The `number`th of `count` parts of a list; every entry is in exactly one."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`3/8`, counted from 1."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
        number, count = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= count <= MOST:
            raise SympruneError(f"A shard is K/N with K from 1 to N, such as 3/8, not {text!r}.")
        return cls(number, count)

    def pick(self, cells: Sequence[Cell]) -> list[Cell]:
        """Every `count`th cell: neighbours, which take alike long, go to different machines."""
        picked = list(cells[self.number - 1 :: self.count])
        if not picked:
            raise SympruneError(
                f"The grid has {len(cells)} cells, so shard {self.number}/{self.count} has none."
            )
        return picked

    def name(self, output: Path) -> Path:
        """`sweep.jsonl` -> `sweep.3of8.jsonl`: no two machines write to one file."""
        return output.with_name(f"{output.stem}.{self.number}of{self.count}{output.suffix}")


@dataclass
class Merged:
    """Cells of several files, and what is to be said about them."""

    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def merge(files: Sequence[Path]) -> Merged:
    """The cells of all files; of one that is in several, the first file's."""
    merged = Merged()
    found_in: dict[str, Path] = {}
    repeated = 0
    for path in files:
        if not path.is_file():
            raise SympruneError(f"There is no file of results {path}.")
        check_results(path)
        cells = read_results(path)
        if not cells:
            raise SympruneError(f"{path} has no finished cells.")
        for key, cell in cells.items():
            first = merged.cells.setdefault(key, cell)
            place = found_in.setdefault(key, path)
            if first is cell:
                continue
            differing = _find_differing(first, cell)
            repeated += differing is None
            if differing is not None:
                merged.notes.append(
                    f"{cell['description']}: {differing} is {first.get(differing)} in {place} and "
                    f"{cell.get(differing)} in {path}; the first is kept."
                )
    if repeated:
        cells_are = "1 cell is" if repeated == 1 else f"{repeated} cells are"
        merged.notes.append(f"{cells_are} in several files, with the same results.")
    merged.notes += _name_missing(files)
    if len({cell["model"] for cell in merged.cells.values()}) > 1:
        merged.notes.append("The files are of several models.")
    return merged


def write(merged: Merged, output: Path, force: bool) -> None:
    """One file with all cells, as a sweep would have left it."""
    if output.exists() and not force:
        raise SympruneError(f"The output {output} exists; choose another or pass --force.")
    check_results(output)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(cell) + "\n" for cell in merged.cells.values())
        durable.write_text(output, lines)
    except OSError as error:
        raise SympruneError(f"Cannot write {output}: {error.strerror}.") from error


def _find_differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first thing two results of a cell do not agree on."""
    names = [name for name in {**one, **other} if name not in PASSING]
    return next((name for name in names if one.get(name) != other.get(name)), None)


def _name_missing(files: Sequence[Path]) -> list[str]:
    """A sentence for each set of shards of which not all are among the files."""
    there: dict[tuple[str, int], set[int]] = {}
    for path in files:
        found = NAMED.search(path.stem)
        if found:
            number, count = map(int, found.groups())
            there.setdefault((path.stem[: found.start()], count), set()).add(number)
    said = []
    for (name, count), numbers in there.items():
        missing = [str(n) for n in range(1, min(count, MOST) + 1) if n not in numbers]
        if missing:
            told = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
            word = "is" if len(missing) == 1 else "are"
            said.append(f"Of the {count} shards of {name}, {told} {word} not among the files.")
    return said
