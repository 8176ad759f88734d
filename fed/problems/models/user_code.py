"""Models and data of users' own, named `module:function` or `file.py:function`.

Such a name is code, and code runs only where who runs the program has named it: on the command
line, or in a node's own settings. What a plan or a server's letter says is a name and no more.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from symprune.errors import SympruneError

# The function is the last word; what is before it may have colons, as on Windows.
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
_allowed: set[str] = set()
_granted: ContextVar[frozenset[str]] = ContextVar("granted", default=frozenset())


def is_code(spec: object, known: tuple[str, ...] = ()) -> bool:
    """Whether a spec names a user's function, and not what the project knows by its first word."""
    if not isinstance(spec, str) or spec.partition(":")[0] in known:
        return False
    return bool(FILE.fullmatch(spec) or MODULE.fullmatch(spec))


def allow_code(*specs: str | None) -> None:
    """Let these names be loaded: the caller is who decides what runs here."""
    _allowed.update(spec for spec in specs if spec is not None)


def grant_code(*specs: str) -> None:
    """Let these be loaded from here on, and what this was told before no longer: of a process that
    answers for an owner who may change its mind."""
    _granted.set(frozenset(specs))


def locate_code(spec: str) -> str:
    """The same name wherever it is read: a file, or a module of this folder, by its path."""
    place, _, name = spec.rpartition(":")
    file = Path(place if FILE.fullmatch(spec) else f"{place.replace('.', '/')}.py")
    return f"{file.resolve()}:{name}" if file.is_file() else spec


def load_code(spec: str, what: str) -> Callable[[], Any]:
    """The function a name stands for, if it may run here; `what` it is, for the sentence."""
    if spec not in _allowed | _granted.get():
        raise SympruneError(
            f"The {what} {spec} is code, which runs only where who runs it has named it: on the "
            "command line, or in the node's own settings."
        )
    place, _, name = spec.rpartition(":")
    try:
        function = getattr(_module(place), name)
    except (Exception, SystemExit) as error:
        raise SympruneError(f"Cannot load the {what} {spec}: {_in_words(error)}.") from error
    if not callable(function):
        raise SympruneError(f"The {what} {spec} is not a function.")

    def call() -> Any:
        try:
            return function()
        except SympruneError:
            raise
        except Exception as error:
            raise SympruneError(f"The {what} {spec} fails: {_in_words(error)}.") from error

    return call


def _module(place: str) -> ModuleType:
    file = place.endswith(".py")
    beside = str(Path(place).resolve().parent) if file else os.getcwd()
    if beside not in sys.path:
        sys.path.insert(0, beside)  # a console script does not look beside the user by itself
    if not file:
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None:
        raise ImportError(f"{place} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _in_words(error: BaseException) -> str:
    said = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}, {said}" if said else type(error).__name__
