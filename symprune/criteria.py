"""The criteria by name: the formulas of `scores`, and users' own."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor

from symprune import scores
from symprune.errors import SympruneError
from symprune.validation import cast_option, check_names

POWERS = {"alpha", "beta"}
LARGEST_POWER = 16
"""Beyond it the norms of a layer, which span some orders of magnitude, leave the fp32 numbers."""
STATISTICS = ("input_norm", "output_norm", "regional_gradient", "generator")


@dataclass(frozen=True)
class Criterion:
    """A scoring function, with what it needs and what it can be told."""

    name: str
    function: Callable[..., Tensor]
    needs: tuple[str, ...]
    defaults: Mapping[str, Any]

    @property
    def formula(self) -> str:
        return (inspect.getdoc(self.function) or "").partition("\n\n")[0].replace("\n", " ")

    def check(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """`params` with each value in its default's type; a name it does not take is an error."""
        owner = f"method {self.name}"
        if not isinstance(params, Mapping):
            raise SympruneError(f"The parameters of {owner} are not names and values: {params!r}.")
        check_names(params, self.defaults.keys(), owner.capitalize(), "parameter")
        found = {
            name: cast_option(owner, name, _kind(self.defaults[name]), value)
            for name, value in params.items()
        }
        for name in POWERS & found.keys() if ":" not in self.name else ():
            if not 0 <= found[name] <= LARGEST_POWER:
                raise SympruneError(
                    f"{name} of {owner} is a power from 0 to {LARGEST_POWER}, not {found[name]}."
                )
        if self.name == "stochria" and "beta" in found:
            scores.check_share(found["beta"])
        return found

    def __call__(
        self, weight: Tensor, statistics: Mapping[str, Any], params: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Score `weight`, taking what is needed from `statistics`; always in fp32."""
        arguments = [statistics[name] for name in self.needs]
        checked = self.check(params or {})
        if ":" not in self.name:
            return self.function(weight.float(), *arguments, **checked)
        try:
            score = self.function(weight.float(), *arguments, **checked)
        except SympruneError:
            raise
        except Exception as error:
            raise SympruneError(f"Method {self.name} fails: {_in_words(error)}.") from error
        if not isinstance(score, Tensor) or score.shape != weight.shape:
            found = tuple(score.shape) if isinstance(score, Tensor) else f"a {type(score).__name__}"
            raise SympruneError(
                f"Method {self.name} returns {found} for a matrix of {tuple(weight.shape)}; a "
                "score has the matrix's shape."
            )
        return score


def criterion(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Register `function` under its name, with hyphens for underscores."""
    made = _as_criterion(function)
    _REGISTRY[made.name] = made
    return function


def available() -> dict[str, Criterion]:
    """All registered criteria by name."""
    return dict(_REGISTRY)


def get(name: str) -> Criterion:
    """The criterion called `name`, or the user's own as `module:function`, if that is allowed."""
    if not isinstance(name, str):
        raise SympruneError(f"A method is a name, not {name!r}.")
    if name in _REGISTRY:
        return _REGISTRY[name]
    module, colon, attribute = name.partition(":")
    if colon and name not in _NAMED | _GRANTED.get():
        raise SympruneError(
            f"Method {name} is code, which runs only if it is named by who runs it: pass --method "
            f"{name} if you trust it (in Python, criteria.allow_code)."
        )
    if colon:
        return _load(module, attribute)
    near = get_close_matches(str(name), _REGISTRY, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_REGISTRY)}."
    raise SympruneError(f"Unknown method {name!r}; {hint}")


def allow_code(name: str | None) -> None:
    """Let `get` import the user's own `module:function`. Files and messages may say it, too, but
    only who runs a command, or writes a program, decides what code it runs."""
    if name is not None and ":" in name:
        _NAMED.add(name)


def grant_code(names: Iterable[str]) -> None:
    """The same for these names alone, until they are granted anew: of a process that answers for an
    owner who may change its mind."""
    _GRANTED.set(frozenset(names))


def _as_criterion(function: Callable[..., Tensor]) -> Criterion:
    parameters = list(inspect.signature(function).parameters.values())
    needs = tuple(p.name for p in parameters[1:] if p.kind is p.POSITIONAL_OR_KEYWORD)
    for need in needs:
        if need not in STATISTICS:
            raise SympruneError(
                f"Criterion {function.__name__} asks for {need!r}; "
                f"statistics are {', '.join(STATISTICS)}, parameters must be keyword-only."
            )
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return Criterion(function.__name__.replace("_", "-"), function, needs, defaults)


def _load(module: str, attribute: str) -> Criterion:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not look beside the user by itself
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        said = _in_words(error)
        raise SympruneError(f"Cannot load method {module}:{attribute}: {said}.") from error
    if not callable(function):
        raise SympruneError(f"Method {module}:{attribute} is not a function.")
    try:
        made = _as_criterion(function)
    except (TypeError, ValueError) as error:
        if isinstance(error, SympruneError):
            raise
        said = _in_words(error)
        raise SympruneError(f"Method {module}:{attribute} is no criterion: {said}.") from error
    return Criterion(f"{module}:{attribute}", made.function, made.needs, made.defaults)


def _in_words(error: BaseException) -> str:
    """`ZeroDivisionError, division by zero`: what user code raised, in one line."""
    said = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}, {said}" if said else type(error).__name__


def _kind(default: Any) -> str:
    """A parameter's type, told from its default; for a number any number will do."""
    if isinstance(default, bool | str):
        return type(default).__name__
    return "float | None" if default is None else "float"


def _formulas() -> list[Callable[..., Tensor]]:
    """The public functions of `scores` that take a weight, in the order of the file."""
    public = [item for name, item in vars(scores).items() if not name.startswith("_")]
    functions = [item for item in public if inspect.isfunction(item)]
    return [
        each for each in functions if next(iter(inspect.signature(each).parameters)) == "weight"
    ]


_REGISTRY = {made.name: made for made in map(_as_criterion, _formulas())}
_NAMED: set[str] = set()
_GRANTED: ContextVar[frozenset[str]] = ContextVar("granted", default=frozenset())
