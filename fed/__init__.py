"""Federated sparse training, and federated pruning of a language model.

    from symprune.fed import build, make_problem, simulate
    result = simulate(build("sparse-proxskip", sparsity=0.9), make_problem("digits"), rounds=100)

    from symprune.fed import prune
    result = prune(model, [tokens_of_one_client, tokens_of_another], Recipe(pattern="2:4"))

Importing the package needs neither Flower nor transformers nor matplotlib.
"""

from __future__ import annotations

from symprune.fed.algorithms import ALGORITHMS, Algorithm, build
from symprune.fed.problems.datasets import load
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Sent, Turn
from symprune.fed.pruning import Privacy, prune
from symprune.fed.simulate import Result, simulate

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
