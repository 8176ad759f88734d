"""Federated sparse training, and federated pruning of a language model.

    from symprune.fed import build, make_problem, simulate
    result = simulate(build("sparse-proxskip", sparsity=0.9), make_problem("digits"), rounds=100)

    from symprune.fed import prune
    result = prune(model, [tokens_of_one_client, tokens_of_another], Recipe(pattern="2:4"))

Names are resolved when first used: importing the package needs neither Flower nor transformers
nor matplotlib, and not even torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symprune.fed.algorithms import ALGORITHMS, Algorithm, build
    from symprune.fed.problems.datasets import load
    from symprune.fed.problems.make import make_problem
    from symprune.fed.problems.problem import Problem
    from symprune.fed.protocol import Sent, Turn
    from symprune.fed.pruning import Privacy, prune
    from symprune.fed.simulate import Result, simulate

_HOME = {
    "ALGORITHMS": "algorithms",
    "Algorithm": "algorithms",
    "Privacy": "pruning",
    "Problem": "problems.problem",
    "Result": "simulate",
    "Sent": "protocol",
    "Turn": "protocol",
    "build": "algorithms",
    "load": "problems.datasets",
    "make_problem": "problems.make",
    "prune": "pruning",
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Privacy",
    "Problem",
    "Result",
    "Sent",
    "Turn",
    "build",
    "load",
    "make_problem",
    "prune",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """`simulate` is the function, although importing its module binds the module to that name."""

    @property
    def simulate(self) -> Any:
        return import_module(f"{__name__}.simulate").simulate

    @simulate.setter
    def simulate(self, module: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package
