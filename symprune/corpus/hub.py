"""Data sets of the hub: `hf:ORG/NAME[:CONFIG][:SPLIT][:COLUMN]`, or a local folder in their place.

Data only: the `datasets` library runs no script that comes with a data set any more, and never does
so here. Of a large one the first rows are read, as they come; what the cache has needs no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from symprune.corpus.documents import Document, choose_column, first_of, read_cell
from symprune.errors import SympruneError

PREFIX = "hf:"
FIRST_CHARACTERS = 50_000_000  # of a split; what is behind them is not read
SPLITS = {"train": ("train",), "test": ("test", "validation", "train")}
_NAME = re.compile(r"[\w.~-]*/[\w.~/-]+")  # a name without a folder may be one of its readers


@dataclass(frozen=True)
class HubName:
    """What `hf:` names."""

    path: str
    config: str | None = None
    split: str | None = None
    column: str | None = None


def parse_name(source: str) -> HubName:
    """The parts of `hf:ORG/NAME:CONFIG:SPLIT:COLUMN`; one that is left empty is as usual."""
    path, *rest = source.removeprefix(PREFIX).split(":")
    if not _NAME.fullmatch(path) or len(rest) > 3:
        raise SympruneError(
            f"{source!r} is not a data set of the hub: write hf:ORG/NAME, and behind it, as far as "
            "needed, :CONFIG:SPLIT:COLUMN."
        )
    return HubName(path, *(part or None for part in rest))


def read_hub(source: str, part: str) -> list[Document]:
    """The documents of a data set; part is `train` or `test`, where the source names no split."""
    name = parse_name(source)
    rows = _open(name, source, SPLITS[part] if name.split is None else (name.split,))
    columns = rows.column_names
    found: list[Document] = []
    try:
        found = first_of(_documents(rows, columns, name, source), FIRST_CHARACTERS)
    except SympruneError:
        raise
    except Exception as error:
        raise _unreachable(source, error) from error
    if not found:
        raise SympruneError(f"There is no text in {source}.")
    return found


def _documents(
    rows: Any, columns: list[str] | None, name: HubName, source: str
) -> Iterator[Document]:
    column: str | None = None
    for number, row in enumerate(rows):
        if column is None:
            column = choose_column(columns or list(row), name.column, source)
        document = read_cell(row.get(column), column, f"row {number} of {source}")
        if document is not None:
            yield document


def _open(name: HubName, source: str, splits: tuple[str, ...]) -> Any:
    """The first of these splits that there is: as it comes, or from the cache without a network."""
    import datasets

    offline = datasets.config.HF_HUB_OFFLINE
    try:
        found = datasets.load_dataset(name.path, name.config, streaming=not offline)
    except Exception as error:
        raise _unreachable(source, error) from error
    for split in splits:
        if split in found:
            return found[split]
    raise SympruneError(
        f"{source} has no split {splits[0]!r}; it has {', '.join(map(str, found))}."
    )


def _unreachable(source: str, error: Exception) -> SympruneError:
    said = str(error).strip().partition("\n")[0][:200]
    reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if "Config name is missing" in said or "BuilderConfig" in said:
        return SympruneError(f"{source} needs a configuration, hf:ORG/NAME:CONFIG ({said}).")
    if "scripts are no longer supported" in str(error):
        return SympruneError(f"{source} is made by a script, and scripts are not run.")
    return SympruneError(
        f"Data set {source} can neither be reached nor found in the cache ({reason}); go online, "
        "or use builtin, self or a file of your own instead."
    )
