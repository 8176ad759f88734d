"""Federated sparse training: the algorithms, the compressors and the engine that runs them.

`simulate(build("sparse-proxskip", sparsity=0.9), make_problem("digits"), rounds=100)`. Names are
resolved when first used; importing the package needs neither Flower nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "ALGORITHMS": "algorithms",
    "build": "algorithms",
    "Algorithm": "protocol",
    "Sent": "protocol",
    "Turn": "protocol",
    "Problem": "problem",
    "make_problem": "tasks",
    "load": "data",
    "simulate": "simulate",
    "Result": "simulate",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"symprune.fed.{_HOME[name]}"), name)
    raise AttributeError(f"module 'symprune.fed' has no attribute {name!r}")
