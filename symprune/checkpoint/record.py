"""`symprune.json`: what was done to a model, beside its weights."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from symprune import __version__
from symprune.card.base import CARD
from symprune.card.text import write_card
from symprune.errors import SympruneError
from symprune.machine import durable
from symprune.machine.checksums import FILE as CHECKSUMS
from symprune.validation import parse_json

RECORD = "symprune.json"
PASSING = ("seconds", "peak_memory_bytes")
"""What is different in every run. It is shown and logged, not kept: equal runs make equal files."""


def write_record(folder: Path, record: dict[str, Any], packed: bool = False) -> None:
    """What was done, which files the folder has because of it, and the card that says so to a
    reader. packed: whether the folder's weights are."""
    lasting = {"versions": versions()} | {n: v for n, v in record.items() if n not in PASSING}
    durable.write_text(folder / CARD, write_card(lasting, packed))
    # An attempt that was killed may have left what is written later, or a file without its name.
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    files = sorted(names - {RECORD, CHECKSUMS})
    text = json.dumps({**lasting, "files": files}, indent=2)
    durable.write_text(folder / RECORD, text + "\n")


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record beside a checkpoint, or None when it was not made by symprune."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = parse_json(path.read_text())
    except (OSError, ValueError) as error:
        raise SympruneError(f"{path} is not a readable record.") from error
    return record if isinstance(record, dict) else None


def is_ours(record: dict[str, Any] | None) -> bool:
    """Whether a record is one that `write_record` wrote."""
    made = record.get("versions") if record else None
    return isinstance(made, dict) and "symprune" in made


def versions() -> dict[str, str]:
    """What made a result: symprune, Python and the packages that touch the numbers."""
    found = {"symprune": __version__, "python": sys.version.split()[0]}
    for package in ("torch", "transformers", "safetensors", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
