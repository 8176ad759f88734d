"""A name with options, as a recipe or a command line gives it -> the dataclass of that name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from symprune.errors import SympruneError

T = TypeVar("T")


def choose(what: str, kinds: Mapping[str, type[T]], options: Any) -> T | None:
    """Nothing, a name, or a mapping with a name and options -> None or an instance of its kind."""
    if options is None:
        return None
    given = {"name": options} if isinstance(options, str) else dict(options)
    name = given.pop("name", None)
    if name not in kinds:
        raise SympruneError(f"Unknown {what} {name!r}; choose {', '.join(kinds)}.")
    known = {field.name: str(field.type) for field in fields(kinds[name])}  # type: ignore[arg-type]
    for option in given:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}."
            raise SympruneError(f"{what.capitalize()} {name} has no option {option!r}; {hint}")
    return kinds[name](**{key: _cast(name, key, known[key], v) for key, v in given.items()})


def written(name: str, chosen: Any) -> dict[str, Any]:
    """The recipe's way of writing a choice, options that were not given left out."""
    return {"name": name, **{k: v for k, v in asdict(chosen).items() if v is not None}}


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SympruneError(f"{name} must be one of {', '.join(choices)}, not {value!r}.")


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise SympruneError(f"{name} must be above 0, not {value}.")


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
