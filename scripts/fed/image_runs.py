"""Image tables of the federated papers: clients with few classes each, steps chosen by the training
loss of the models that clients would use, accuracy on every client's own test rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from experiment_tables import Row, show, spread
from torch import Tensor

from symprune.errors import Diverged, SympruneError
from symprune.fed.algorithms import build
from symprune.fed.compare.runs import TUNING_SEED
from symprune.fed.problems.datasets import Dataset, load
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import Result, simulate

IMAGES = ("mnist", "fashion-mnist")


@dataclass(frozen=True)
class Method:
    """One line of a table: an algorithm, its options, and the option that is chosen on a grid."""

    label: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    grid: tuple[str, tuple[float, ...]] | None = None


def some_rows(data: Dataset, count: int) -> Dataset:
    """Rows drawn once and for all; the test set, if there is one, stays whole."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    return data.take(order[:count])


def image_clients(
    name: str, model: str, split: str = "class:3", clients: int = 20, rows: int = 2000
) -> Problem:
    """Images shared out to the clients, who keep 30 % of them for their own test."""
    data = some_rows(load(name), rows)
    return make_problem(data, model, split, clients=clients, l2=1e-4, client_test_share=0.3)


def deployed(result: Result, problem: Problem) -> Tensor:
    """The models clients use: their personal ones, or the shared one."""
    own = result.algorithm.personal_models(result.server, result.client, problem)
    return result.model.expand(problem.clients, -1) if own is None else own


def accuracy(result: Result, problem: Problem) -> float:
    """Of every client's model on its own test rows, the mean over clients."""
    return problem.evaluate_personal(deployed(result, problem))["personal_accuracy"]


def run(name: str, options: dict[str, Any], problem: Problem, rounds: int, seed: int) -> Result:
    return simulate(build(name, **options), problem, rounds, seed=seed, evaluate_every=rounds)


def choose(method: Method, problem: Problem, rounds: int) -> dict[str, Any]:
    """The options with the value of the grid that has the lowest training loss at the end."""
    if method.grid is None:
        return method.options
    option, values = method.grid
    best, chosen = math.inf, None
    for value in values:
        options = {**method.options, option: value}
        try:
            result = run(method.name, options, problem, rounds, TUNING_SEED)
        except Diverged:
            continue
        loss = float(problem.value(deployed(result, problem)).double().mean())
        if loss < best:
            best, chosen = loss, options
    if chosen is None:
        raise SympruneError(f"{method.label} diverges with every value of {option}.")
    return chosen


def image_table(
    title: str, problem: Problem, methods: list[Method], rounds: tuple[int, ...], seeds: int = 3
) -> list[Row]:
    """Accuracy after so many rounds, what was sent until the last, and the step that was chosen."""
    rows = []
    for method in methods:
        options = choose(method, problem, rounds[-1])
        row: Row = {"method": method.label}
        if method.grid is not None:
            row["step"] = options[method.grid[0]]
        for count in rounds:
            runs = [run(method.name, options, problem, count, seed) for seed in range(seeds)]
            row[f"round {count}"] = spread([accuracy(result, problem) for result in runs])
        ledger = runs[-1].history[-1]
        row["MB"] = (ledger["bytes_up"] + ledger["bytes_down"]) / 1e6
        rows.append(row)
        print(row, flush=True)
    return show(f"{title}: accuracy in %, {seeds} seeds", rows)
