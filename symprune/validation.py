"""What users type, in files and on command lines -> checked values.

What comes out of a file is read here, with limits (`parse_yaml`, `parse_json`). One caster gives
every option its type (`cast_option`), one grammar reads `--set NAME=VALUE`
(`parse_assignments`), and `choose` makes a step of a recipe from a name with options.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import yaml

from symprune.errors import SympruneError

T = TypeVar("T")
DEEPEST = 32  # levels of a YAML file
LARGEST = 10**7  # bytes of one
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
IN_WORDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "None": "none",
}


def cast_option(owner: str, name: str, kind: str, value: Any) -> Any:
    """`value`, from Python, a file or a command line, as an option's type.

    owner: whose option it is, for the message. kind: an annotation made of bool, int, float, str,
    None, `tuple[...]` and `|`. Text stands for what it says, whole numbers for floats, lists for
    tuples; nothing is rounded.
    """
    kinds = _split(kind, "|")
    try:
        return _cast(value, kinds)
    except (TypeError, ValueError):
        takes = " or ".join(IN_WORDS.get(each, "a list") for each in kinds)
        raise SympruneError(
            f"Option {name} of {owner} cannot be {value!r}; it takes {takes}."
        ) from None


def _cast(value: Any, kinds: list[str]) -> Any:
    """As the first of the kinds that fits; its own type fits best."""
    if "None" in kinds and str(value).lower() == "none":
        return None
    if type(value).__name__ in kinds and not (isinstance(value, float) and math.isnan(value)):
        return value
    for kind in kinds:
        try:
            return _cast_to(kind, value)
        except (TypeError, ValueError):
            continue
    raise ValueError


def _cast_to(kind: str, value: Any) -> Any:
    if kind.startswith("tuple"):
        if not isinstance(value, list | tuple):
            raise TypeError
        inner = _split(kind.removeprefix("tuple[").removesuffix("]"), ",")[0]
        return tuple(_cast(entry, _split(inner, "|")) for entry in value)
    if kind == "bool":
        if str(value).lower() not in TRUE + FALSE:
            raise ValueError
        return str(value).lower() in TRUE
    if kind not in ("int", "float", "str") or isinstance(value, bool):
        raise TypeError
    if not isinstance(value, str | int | float):
        raise TypeError
    if kind == "int" and isinstance(value, float) and not value.is_integer():
        raise ValueError
    if kind == "float" and math.isnan(float(value)):
        raise ValueError
    return {"int": int, "float": float, "str": str}[kind](value)


def _split(kind: str, sign: str) -> list[str]:
    """An annotation at every `sign` that stands in no brackets."""
    parts, depth = [""], 0
    for letter in kind:
        depth += (letter == "[") - (letter == "]")
        if letter == sign and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def parse_assignments(texts: Iterable[str]) -> dict[str, Any]:
    """What `--set NAME=VALUE` says, for all of them: `["a=1", "b-c=[0.1, x]"]` ->
    `{"a": 1, "b_c": [0.1, "x"]}`. Values are read as YAML."""
    assigned = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise SympruneError(f"--set {text!r} is not of the form NAME=VALUE.")
        try:
            assigned[name.strip().replace("-", "_")] = read_numbers(parse_yaml(value))
        except yaml.YAMLError:
            raise SympruneError(f"--set {text!r}: {value!r} is not a value in YAML.") from None
    return assigned


class _Loader(yaml.SafeLoader):
    """YAML without what a few lines can grow without bounds by: nesting and repetition."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not taken")
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.YAMLError("it is nested too deeply")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def check_small_file(path: Path, what: str) -> None:
    """Refuse to read what has no end or is no list of settings; that nothing is there is found out
    by reading it."""
    if path.exists() and not path.is_file():
        raise SympruneError(f"{what} {path} is not a file.")
    if path.exists() and path.stat().st_size > LARGEST:
        raise SympruneError(f"{what} {path} is larger than {LARGEST:,} bytes.")


def parse_yaml(text: str) -> Any:
    """What YAML says; `yaml.YAMLError` when it makes no sense."""
    return yaml.load(text, _Loader)


def parse_json(text: str | bytes) -> Any:
    """What JSON says; `ValueError` when it makes no sense, however it is nested."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The names and values of a YAML file (JSON is YAML too); `what` it is, for the message."""
    try:
        check_small_file(path, what.capitalize())
        values = parse_yaml(path.read_text())
    except OSError as error:
        raise SympruneError(f"Cannot read {what} {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SympruneError(f"{what.capitalize()} {path} is neither YAML nor JSON.") from error
    if not isinstance(values, dict):
        raise SympruneError(f"{what.capitalize()} {path} is not a list of names and values.")
    return values


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value out of a JSON file is a number a float can hold; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < 2**1023


def has_kinds(value: Any, kinds: Mapping[str, type]) -> TypeGuard[dict[str, Any]]:
    """Whether a value out of a JSON file is a mapping in which these names have values of these
    kinds; float is any number."""
    return isinstance(value, dict) and all(
        is_number(value.get(name)) if kind is float else type(value.get(name)) is kind
        for name, kind in kinds.items()
    )


def read_numbers(value: Any) -> Any:
    """YAML reads 1e-3 as text; here it is a number, wherever it stands."""
    if isinstance(value, dict):
        return {key: read_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [read_numbers(entry) for entry in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def check_names(given: Iterable[str], known: Collection[str], owner: str, what: str = "") -> None:
    """Refuse a name that is not known, with the nearest one that is; `what` it would be."""
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            takes = ", ".join(known) or "none"
            hint = f"did you mean {near[0]}?" if near else f"it takes {takes}."
            raise SympruneError(f"{owner} has no {what + ' ' if what else ''}{name!r}; {hint}")


def choose(what: str, kinds: Mapping[str, type[T]], options: Any) -> T | None:
    """Nothing, a name, or a mapping with a name and options -> None or an instance of its kind."""
    if options is None:
        return None
    if not isinstance(options, str | Mapping):
        raise SympruneError(f"{what.capitalize()} {options!r} is neither a name nor a mapping.")
    given = {"name": options} if isinstance(options, str) else dict(options)
    name = given.pop("name", None)
    if not isinstance(name, str) or name not in kinds:
        raise SympruneError(f"Unknown {what} {name!r}; choose {', '.join(kinds)}.")
    known = {field.name: str(field.type) for field in fields(kinds[name])}  # type: ignore[arg-type]
    check_names(given, known, f"{what.capitalize()} {name}")
    return kinds[name](**{k: cast_option(name, k, known[k], v) for k, v in given.items()})


def to_mapping(chosen: Any) -> dict[str, Any] | None:
    """What `choose` made, as a recipe writes it; options that were not given are left out."""
    if chosen is None:
        return None
    return {"name": chosen.name, **{k: v for k, v in asdict(chosen).items() if v is not None}}


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SympruneError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")


def check_whole(name: str, value: Any, least: int, most: int) -> None:
    if not _is_whole(value) or not least <= value <= most:
        raise SympruneError(f"{name} must be a whole number from {least:,} to {most:,}.")


def check_seed(name: str, value: Any) -> None:
    if not _is_whole(value) or not -(2**63) <= value < 2**63:
        raise SympruneError(f"{name} must be a whole number of 64 bits, not {value!r}.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise SympruneError(f"{name} must be above 0, not {value}.")


def check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise SympruneError(f"{name} must be 0 or more, not {value}.")


def check_finite(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise SympruneError(f"{name} must be a number, not {value}.")
