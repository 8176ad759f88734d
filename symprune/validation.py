"""What users write in files and options -> checked values: mappings, and names with options."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml

from symprune.errors import SympruneError

T = TypeVar("T")


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The names and values of a YAML file (JSON is YAML too); `what` it is, for the message."""
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SympruneError(f"Cannot read {what} {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SympruneError(f"{what.capitalize()} {path} is neither YAML nor JSON.") from error
    if not isinstance(values, dict):
        raise SympruneError(f"{what.capitalize()} {path} is not a list of names and values.")
    return values


def check_names(given: Iterable[str], known: Collection[str], owner: str) -> None:
    """Refuse a name that is not known, with the nearest one that is."""
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}."
            raise SympruneError(f"{owner} has no {name!r}; {hint}")


def choose(what: str, kinds: Mapping[str, type[T]], options: Any) -> T | None:
    """Nothing, a name, or a mapping with a name and options -> None or an instance of its kind."""
    if options is None:
        return None
    given = {"name": options} if isinstance(options, str) else dict(options)
    name = given.pop("name", None)
    if name not in kinds:
        raise SympruneError(f"Unknown {what} {name!r}; choose {', '.join(kinds)}.")
    known = {field.name: str(field.type) for field in fields(kinds[name])}  # type: ignore[arg-type]
    check_names(given, known, f"{what.capitalize()} {name}")
    return kinds[name](**{key: _cast(name, key, known[key], v) for key, v in given.items()})


def to_mapping(chosen: Any) -> dict[str, Any] | None:
    """What `choose` made, as a recipe writes it; options that were not given are left out."""
    if chosen is None:
        return None
    return {"name": chosen.name, **{k: v for k, v in asdict(chosen).items() if v is not None}}


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SympruneError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise SympruneError(f"{name} must be above 0, not {value}.")


def check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise SympruneError(f"{name} must be 0 or more, not {value}.")


def _cast(owner: str, name: str, kind: str, value: Any) -> Any:
    """A value from a file or a command line as the option's type."""
    if value is None:
        return None
    plain = {"bool": bool, "int": int, "float": float, "str": str}[kind.split(" ")[0]]
    try:
        if plain is bool and not isinstance(value, bool):
            raise ValueError
        return plain(value)
    except (TypeError, ValueError):
        raise SympruneError(
            f"Option {name} of {owner} has the wrong type: {value!r} is no {plain.__name__}."
        ) from None
