"""What is compared: a model, whatever it is stored as, a record of a run, or the result of an
evaluation. Read from names, before anything is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from symprune.checkpoint.packed_shards import CONFIG
from symprune.checkpoint.record import RECORD, is_ours, read_record
from symprune.errors import SympruneError
from symprune.models import hub
from symprune.validation import has_kinds, is_number, parse_json

TASKS = "zeroshot"  # what `symprune eval --tasks --json` calls its scores


@dataclass(frozen=True)
class Source:
    """One of those compared. A model has an origin, a run a record; an evaluation has scores."""

    given: str
    name: str
    dtype: str
    origin: hub.Origin | None = None
    folder: Path | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)
    label: str = ""

    @property
    def is_gguf(self) -> bool:
        return self.origin is not None and self.origin.gguf_file is not None


def read_sources(given: Sequence[str], dtype: str, access: hub.Access) -> list[Source]:
    """Those that were named, each with a label of its own; scores belong to the model they are of,
    where that is among them."""
    twice = [name for name, count in Counter(given).items() if count > 1]
    if twice:
        raise SympruneError(f"{twice[0]} is named twice; name each once.")
    found = [read_source(each, dtype, access) for each in given]
    kept = [each for each in found if not _belongs_to_another(each, found)]
    kept = [replace(each, scores={**each.scores, **_scores_of(each, found)}) for each in kept]
    if len(kept) < 2:
        raise SympruneError("Name two models or runs or more, to compare them.")
    short = [Path(each.given).name or each.given for each in kept]
    short = [_name_of_record(each, label) for each, label in zip(kept, short, strict=True)]
    labels = short if len(set(short)) == len(short) else [each.given for each in kept]
    return [replace(each, label=label) for each, label in zip(kept, labels, strict=True)]


def _name_of_record(source: Source, label: str) -> str:
    """A run's folder instead of `symprune.json`."""
    path = Path(source.given)
    return path.absolute().parent.name or label if path.name == RECORD else label


def read_source(given: str, dtype: str, access: hub.Access) -> Source:
    """One of them."""
    name, asked = hub.split_dtype(given, dtype)
    hub.check_dtype(asked)
    path = Path(name).expanduser()
    if path.suffix == ".json":
        return _read_result(given, path)
    if path.is_dir() and not (path / CONFIG).is_file() and (path / RECORD).is_file():
        return _of_record(given, path, read_record(path))
    origin = hub.resolve(name, access)
    record = read_record(path) if path.is_dir() else None
    record = record if record is not None and is_ours(record) else {}
    return Source(given, name, asked, origin, path if path.is_dir() else None, record)


def _of_record(given: str, folder: Path, record: Mapping[str, Any] | None) -> Source:
    if record is None or not has_kinds(record, {"recipe": dict, "layers": list}):
        raise SympruneError(f"{given} is not the record of a run.")
    return Source(given, str(record.get("model", given)), "auto", None, folder, record)


def _read_result(given: str, path: Path) -> Source:
    """A `symprune.json`, or what `--json` of `prune` or `eval` wrote."""
    try:
        plain = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SympruneError(f"There is no file {given}.") from None
    except (OSError, ValueError) as error:
        raise SympruneError(f"{given} is not a readable JSON file.") from error
    if has_kinds(plain, {"model": str, "layers": list}):
        return _of_record(given, path.parent, plain)
    if has_kinds(plain, {"model": str}) and isinstance(plain.get(TASKS), dict):
        return Source(given, plain["model"], "auto", scores=read_scores(plain[TASKS]))
    raise SympruneError(
        f"{given} is neither the record of a run nor the result of `symprune eval --tasks --json`."
    )


def read_scores(plain: Mapping[str, Any]) -> dict[str, float]:
    """Accuracy by task, and the mean."""
    tasks = plain.get("tasks")
    found: dict[str, float] = {}
    for name, about in tasks.items() if isinstance(tasks, dict) else ():
        value = about.get("value") if isinstance(about, dict) else None
        if is_number(value):
            found[str(name)] = value
    if is_number(plain.get("mean")) and len(found) > 1:
        found["mean of the tasks"] = plain["mean"]
    return found


def _belongs_to_another(source: Source, every: Sequence[Source]) -> bool:
    return bool(source.scores) and any(
        other is not source and not other.scores and _same(other.name, source.name)
        for other in every
    )


def _scores_of(source: Source, every: Sequence[Source]) -> dict[str, float]:
    found: dict[str, float] = {}
    for other in every:
        if other is not source and _same(other.name, source.name) and not source.scores:
            found |= other.scores
    return found


def _same(one: str, other: str) -> bool:
    """Whether two names are of one model; folders may be written in several ways."""
    paths = [Path(name).expanduser() for name in (one, other)]
    return one == other or (all(p.exists() for p in paths) and paths[0].samefile(paths[1]))
