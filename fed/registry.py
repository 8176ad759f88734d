"""Finding an algorithm by its name, with hyper-parameters that are checked before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from symprune.errors import SympruneError
from symprune.fed.protocol import Algorithm, check

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
    for option in options:
        if option not in known_options:
            listed = ", ".join(options_of(cls)) or "none"
            raise SympruneError(f"{name} has no option {option!r}; its options are {listed}.")
    for option, f in known_options.items():
        if f.default is MISSING and f.default_factory is MISSING and option not in options:
            raise SympruneError(f"{name} needs the option {option}.")
    typed = {o: _typed(name, o, v, str(known_options[o].type)) for o, v in options.items()}
    return cls(**typed)


def choose(name: str, **options: Any) -> Algorithm:
    """`build` for options that a user gave: what `prepare` fills in is not among them."""
    algorithm = build(name, **options)
    for option in options:
        fixed = option not in options_of(type(algorithm))
        check(not fixed, f"{name} takes {option} from the problem, it cannot be chosen.")
    return algorithm


def _typed(name: str, option: str, value: Any, kind: str) -> Any:
    """The value if its type fits the field's annotation; whole numbers may stand for floats and
    lists for tuples, since that is how they are typed on a command line."""
    kind = kind.replace("PerClient", "float | tuple")
    if isinstance(value, list | tuple) and "tuple" in kind:
        try:
            return _entries(value, kind.partition("tuple[")[2])
        except (TypeError, ValueError):
            raise SympruneError(f"{name}: {option} = {value!r} is not of type {kind}.") from None
    if isinstance(value, bool) or value is None:
        fits = ("bool" if isinstance(value, bool) else "None") in kind
    elif isinstance(value, int) and "int" not in kind and "float" in kind:
        return float(value)
    else:
        fits = type(value).__name__ in kind
    check(fits, f"{name}: {option} = {value!r} is not of type {kind}.")
    return value


def _entries(values: Sequence[Any], inner: str) -> tuple[Any, ...]:
    """A tuple whose entries are what its annotation says: whole numbers, words, tuples, floats."""
    if inner.startswith("tuple["):
        return tuple(_entries(v, inner.removeprefix("tuple[")) for v in values)
    kind = int if inner.startswith("int") else str if inner.startswith("str") else float
    return tuple(kind(v) for v in values)
