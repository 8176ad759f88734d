"""FedSpa's claims at a size that takes minutes: personal masks against baselines under label skew,
the best sparsity against heterogeneity, and pruning criteria that pick personal masks.

    python scripts/fed/experiments_fedspa.py [fedspa-methods] [fedspa-sparsity] [mask-scores] ...
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from experiment_tables import Experiment, Row, main, show, spread

from symprune.fed.algorithms import build
from symprune.fed.algorithms.fedspa.local_scores import weight_scores
from symprune.fed.algorithms.shared.layer_masks import best_mask, layer_ones
from symprune.fed.problems.datasets import load
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem, Rows
from symprune.fed.problems.synthetic import gaussian_classes
from symprune.fed.protocol import Turn
from symprune.fed.simulate import Result, simulate

TRAINING = {"batch": 16, "lr": 0.05, "cohort_size": 5}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg-epochs", {}),
    "FedSpa DST": ("fedspa", {}),
    "DST, random growth": ("fedspa", {"grow": "random"}),
    "DST, uniform densities": ("fedspa", {"allocation": "uniform"}),
    "DST, different masks": ("fedspa", {"different_masks": True}),
    "FedSpa RSM": ("fedspa", {"search": "rsm"}),
    "RSM, different masks": ("fedspa", {"search": "rsm", "different_masks": True}),
    "Ditto": ("ditto", {}),
    "pFedMe": ("pfedme", {}),
    "Sub-FedAvg": ("sub-fedavg", {}),
    "Subsampling": ("subsampling", {}),
    "Local": ("local", {}),
}


def train(name: str, options: dict[str, Any], problem: Problem, rounds: int, seed: int) -> Result:
    if name == "fedspa":
        options = {"anneal_rounds": rounds, **options}
    shared = {"cohort_size": TRAINING["cohort_size"]} if name == "pfedme" else TRAINING
    algorithm = build(name, **{**shared, **options})
    return simulate(algorithm, problem, rounds, seed=seed, evaluate_every=rounds)


def accuracy(result: Result, problem: Problem) -> float:
    """Every client's model on its own test rows; without personal models, the shared one."""
    last = result.history[-1]
    if "personal_accuracy" in last:
        return last["personal_accuracy"]
    shared = result.model.expand(problem.clients, -1)
    return problem.evaluate_personal(shared)["personal_accuracy"]


def megabytes(result: Result) -> float:
    return (result.history[-1]["bytes_up"] + result.history[-1]["bytes_down"]) / 1e6


def methods(rounds: int = 50, seeds: int = 2) -> list[Row]:
    """FedSpa's Table 1 in small: accuracy with and without label skew, and what was sent."""
    rows = []
    for label, (name, options) in METHODS.items():
        found: dict[str, Any] = {"method": label}
        for setting, skew in (("iid", None), ("skew 0.2", 0.2)):
            values = []
            for seed in range(seeds):
                problem = gaussian_classes(skew, seed=seed)
                result = train(name, options, problem, rounds, seed)
                values.append(accuracy(result, problem))
            found[setting] = spread(values)
        found["MB"] = megabytes(result)
        rows.append(found)
    return show(f"Personal accuracy in %, {rounds} rounds, {seeds} seeds", rows)


def sparsity(rounds: int = 50, seeds: int = 2) -> list[Row]:
    """The paper's central claim: the more clients differ, the more zeros are best (Table 3)."""
    rows = []
    for setting, skew in (("iid", None), ("skew 0.2", 0.2), ("skew 0.1", 0.1)):
        found: dict[str, Any] = {"data": setting}
        for zeros in (0.0, 0.2, 0.5, 0.8):
            values = []
            for seed in range(seeds):
                problem = gaussian_classes(skew, seed=seed)
                result = train("fedspa", {"density": 1 - zeros}, problem, rounds, seed)
                values.append(accuracy(result, problem))
            found[f"sparsity {zeros}"] = spread(values)
        rows.append(found)
    return show(f"FedSpa DST, personal accuracy in %, {rounds} rounds, {seeds} seeds", rows)


SCORES = ("magnitude", "wanda", "ria", "symwanda", "stochria")


def digit_clients(seed: int) -> Problem:
    """20 clients with three classes of digits each, 30 % of their rows for their own test."""
    return make_problem(
        "digits", "mlp:100-50", "class:3", clients=20, l2=5e-4, seed=seed, client_test_share=0.3
    )


def everybodys_rows(rows: Rows) -> Rows:
    """One client with the rows of all: what a server that saw the data would calibrate on."""
    used = rows.weights != 0
    return Rows(rows.x[used], rows.y[used], rows.weights[used])[None]


def one_shot_masks(rounds: int = 60, seeds: int = 3) -> list[Row]:
    """A trained shared model, pruned for each client from its own activations or, to tell the
    criterion from the personalisation, for all from everybody's, and not trained on."""
    densities = (1.0, 0.5, 0.3, 0.2, 0.1)
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for seed in range(seeds):
        problem = digit_clients(seed)
        shared = train("fedavg-epochs", {"lr": 0.1}, problem, rounds, seed).model
        w = shared.expand(problem.clients, -1)
        stream = Turn(0, seed, problem.clients, torch.arange(problem.clients)).stream("score")
        for score in SCORES:
            for whose, calibration in (
                ("own", problem.rows),
                ("everybody's", everybodys_rows(problem.rows)),
            ):
                rated = weight_scores(score, problem, w[: len(calibration.y)], calibration, stream)
                for r in densities:
                    ones = layer_ones(problem.layout, r, "uniform")
                    mask = best_mask(rated, tuple(problem.layout.sizes), ones)
                    personal = problem.evaluate_personal(mask * w)["personal_accuracy"]
                    by = found.setdefault((score, whose), {})
                    by.setdefault(r, []).append(personal)
    rows = [
        {"score": score, "rows": whose} | {f"density {r}": spread(v) for r, v in by.items()}
        for (score, whose), by in found.items()
    ]
    return show(f"Pruned once after {rounds} rounds of FedAvg: personal accuracy in %", rows)


def trained_masks(rounds: int = 40, seeds: int = 2, density: float = 0.2) -> list[Row]:
    """The same criteria inside three federated methods that train with their masks."""
    ways = {
        "score-picked masks": ("fedspa", {"search": "score", "allocation": "uniform"}),
        "prune and regrow": ("fedspa", {"search": "dst", "allocation": "uniform"}),
        "Sub-FedAvg": ("sub-fedavg", {"prune_step": 0.2}),
    }
    problems = [digit_clients(seed) for seed in range(seeds)]
    rows = []
    for score in SCORES:
        found: dict[str, Any] = {"score": score}
        for way, (name, options) in ways.items():
            values = []
            for seed, problem in enumerate(problems):
                chosen = {**options, "mask_score": score, "density": density, "lr": 0.1}
                values.append(accuracy(train(name, chosen, problem, rounds, seed), problem))
            found[way] = spread(values)
        rows.append(found)
    title = f"Trained with masks of density {density}: personal accuracy in %, {rounds} rounds"
    return show(title, rows)


def mnist(rounds: int = 20) -> list[Row]:
    """LeNet-5 on MNIST, 20 clients with two classes and about 100 training rows each."""
    data = load("mnist")
    data = replace(data.take(torch.arange(2800)), test_x=None, test_y=None)
    problem = make_problem(
        data, "lenet5", "class-set:2", clients=20, l2=5e-4, client_test_share=0.3
    )
    rows = []
    for label in ("FedAvg", "FedSpa DST", "FedSpa RSM", "Ditto", "Local"):
        name, options = METHODS[label]
        chosen = {**options, "batch": 32, "epochs": 2}
        if name == "ditto":
            chosen = {**chosen, "epochs": 1, "personal_epochs": 1}
        result = train(name, chosen, problem, rounds, seed=0)
        found = spread([accuracy(result, problem)])
        rows.append({"method": label, "accuracy": found, "MB": megabytes(result)})
    return show(f"LeNet-5 on MNIST: personal accuracy in %, {rounds} rounds, one seed", rows)


EXPERIMENTS: dict[str, Experiment] = {
    "fedspa-methods": methods,
    "fedspa-sparsity": sparsity,
    "mask-scores": one_shot_masks,
    "mask-scores-trained": trained_masks,
    "fedspa-mnist": mnist,
}

if __name__ == "__main__":
    main(EXPERIMENTS)
