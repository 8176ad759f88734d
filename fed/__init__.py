"""Federated sparse training, and federated pruning of a language model.

    from symprune.fed import build, make_problem, simulate
    result = simulate(build("sparse-proxskip", sparsity=0.9), make_problem("digits"), rounds=100)

    from symprune.fed import Module, Problem, stack_rows             # a problem of your own
    problem = Problem(Module(make_network, loss, "classification"), stack_rows(clients_rows))

    from symprune.fed import Algorithm, check, register              # an algorithm of your own:
                                                                     # fed/algorithms/__init__.py

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
    from symprune.fed.algorithms import ALGORITHMS, build, register
    from symprune.fed.problems.datasets import Dataset, load, text_data
    from symprune.fed.problems.layout import FlatLayout
    from symprune.fed.problems.losses import (
        Linear,
        Logistic,
        Loss,
        Module,
        Softmax,
        cross_entropy,
        squared_error,
    )
    from symprune.fed.problems.make import make_problem
    from symprune.fed.problems.models.causal_lm import CausalLM
    from symprune.fed.problems.models.lora import add_lora, merge_lora
    from symprune.fed.problems.optimum import minimise
    from symprune.fed.problems.problem import Constants, Problem, Rows, stack_rows
    from symprune.fed.protocol import (
        Algorithm,
        LayeredModel,
        Like,
        Message,
        Received,
        SampledClients,
        Sent,
        State,
        Turn,
        check,
        filled,
        given,
        kept,
        per_client,
        sample,
    )
    from symprune.fed.pruning import Privacy, prune
    from symprune.fed.randomness import Stream
    from symprune.fed.simulate import Result, simulate

_HOME = {
    "ALGORITHMS": "algorithms",
    "Algorithm": "protocol",
    "CausalLM": "problems.models.causal_lm",
    "Constants": "problems.problem",
    "Dataset": "problems.datasets",
    "FlatLayout": "problems.layout",
    "LayeredModel": "protocol",
    "Like": "protocol",
    "Linear": "problems.losses",
    "Logistic": "problems.losses",
    "Loss": "problems.losses",
    "Message": "protocol",
    "Module": "problems.losses",
    "Privacy": "pruning",
    "Problem": "problems.problem",
    "Received": "protocol",
    "Result": "simulate",
    "Rows": "problems.problem",
    "SampledClients": "protocol",
    "Sent": "protocol",
    "Softmax": "problems.losses",
    "State": "protocol",
    "Stream": "randomness",
    "Turn": "protocol",
    "add_lora": "problems.models.lora",
    "build": "algorithms",
    "check": "protocol",
    "cross_entropy": "problems.losses",
    "filled": "protocol",
    "given": "protocol",
    "kept": "protocol",
    "load": "problems.datasets",
    "make_problem": "problems.make",
    "merge_lora": "problems.models.lora",
    "minimise": "problems.optimum",
    "per_client": "protocol",
    "prune": "pruning",
    "register": "algorithms",
    "sample": "protocol",
    "squared_error": "problems.losses",
    "stack_rows": "problems.problem",
    "text_data": "problems.datasets",
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "CausalLM",
    "Constants",
    "Dataset",
    "FlatLayout",
    "LayeredModel",
    "Like",
    "Linear",
    "Logistic",
    "Loss",
    "Message",
    "Module",
    "Privacy",
    "Problem",
    "Received",
    "Result",
    "Rows",
    "SampledClients",
    "Sent",
    "Softmax",
    "State",
    "Stream",
    "Turn",
    "add_lora",
    "build",
    "check",
    "cross_entropy",
    "filled",
    "given",
    "kept",
    "load",
    "make_problem",
    "merge_lora",
    "minimise",
    "per_client",
    "prune",
    "register",
    "sample",
    "simulate",
    "squared_error",
    "stack_rows",
    "text_data",
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
