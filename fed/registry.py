"""Finding an algorithm by its name, with hyper-parameters that are checked before it is made."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from symprune.errors import SympruneError
from symprune.fed.protocol import Algorithm, check, check_options
from symprune.validation import cast_option, check_names

ALGORITHMS: dict[str, type[Algorithm]] = {}
ALIASES = {"scaffnew": "proxskip"}


def options_of(cls: type[Algorithm]) -> list[str]:
    """The names of the hyper-parameters a user may choose."""
    return [f.name for f in fields(cls) if not f.metadata.get("filled")]


def register(cls: type[Algorithm]) -> type[Algorithm]:
    """Class decorator: the algorithm is found by its name from then on."""
    for needed in ("name", "paper", "sends"):
        if not getattr(cls, needed):
            raise TypeError(f"{cls.__name__} needs a class attribute {needed}.")
    if ALGORITHMS.get(cls.name, cls).__qualname__ != cls.__qualname__:
        raise TypeError(f"Two algorithms are called {cls.name}.")
    ALGORITHMS[cls.name] = cls
    return cls


def build(name: str, **options: Any) -> Algorithm:
    """The algorithm of this name with these hyper-parameters; unknown ones are named."""
    name = ALIASES.get(name, name)
    if name not in ALGORITHMS:
        known = ", ".join(sorted(ALGORITHMS))
        raise SympruneError(f"Unknown algorithm {name!r}; choose from {known}.")
    cls = ALGORITHMS[name]
    known_options = {f.name: f for f in fields(cls)}
    unknown = [option for option in options if option not in known_options]
    check_names(unknown, options_of(cls), name, "option")
    for option, f in known_options.items():
        if f.default is MISSING and f.default_factory is MISSING and option not in options:
            raise SympruneError(f"{name} needs the option {option}.")
    fixed = "layout" not in options  # which is not in words a user could write
    check(fixed, f"{name} takes layout from the problem, it cannot be chosen.")
    cast = {o: cast_option(name, o, _kind(known_options[o]), v) for o, v in options.items()}
    algorithm = cls(**cast)
    check_options(algorithm)
    return algorithm


def _kind(option: Field[Any]) -> str:
    """The option's annotation, in words that `cast_option` knows."""
    return str(option.type).replace("PerClient", "float | tuple[float, ...]")


def choose(name: str, **options: Any) -> Algorithm:
    """`build` for options that a user gave: what `prepare` fills in is not among them."""
    algorithm = build(name, **options)
    for option in options:
        fixed = option not in options_of(type(algorithm))
        check(not fixed, f"{name} takes {option} from the problem, it cannot be chosen.")
    return algorithm
