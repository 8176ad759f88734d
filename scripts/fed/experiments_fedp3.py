"""FedP3's claims at a size that takes minutes: accuracy against the layers a client sends, against
global and local pruning, aggregation, and LDP-FedP3's accuracy against its privacy.

    python scripts/fed/experiments_fedp3.py [fedp3-layers] [fedp3-keep] [fedp3-variants] [ldp-fedp3]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from experiment_tables import Experiment, Row, main, show, spread

from symprune.fed.algorithms import build
from symprune.fed.problems.datasets import Dataset, load
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import Result, simulate

SPLITS = {"S1": "class-set:5", "S2": "preference:0.5"}
NETWORK = "he-mlp:48-48-48-48"


def all_digits() -> Dataset:
    """Training and test rows as one pool; every client keeps 30 % for its own test."""
    data = load("digits")
    assert data.test_x is not None and data.test_y is not None
    x, y = torch.cat([data.x, data.test_x]), torch.cat([data.y, data.test_y])
    return replace(data, x=x, y=y, test_x=None, test_y=None)


def clients(split: str, seed: int) -> Problem:
    return make_problem(
        all_digits(), NETWORK, SPLITS[split], 20, l2=0.0, seed=seed, client_test_share=0.3
    )


def train(problem: Problem, seed: int, rounds: int, **options: Any) -> Result:
    algorithm = build("fedp3", **{"steps": 10, "batch": 32, "lr": 0.1, **options})
    return simulate(algorithm, problem, rounds, seed=seed, evaluate_every=rounds)


def accuracy(result: Result, problem: Problem) -> float:
    """The server's model on all clients' test rows."""
    shared = result.model.expand(problem.clients, -1)
    return problem.evaluate_personal(shared)["personal_accuracy"]


def measure(split: str, rounds: int, seeds: int, **options: Any) -> tuple[str, float, float]:
    """Accuracy over seeds, and the shares of the parameters and of the layers sent up."""
    values, parameters, layers = [], 0.0, 0.0
    for seed in range(seeds):
        problem = clients(split, seed)
        result = train(problem, seed, rounds, **options)
        values.append(accuracy(result, problem))
        last = result.history[-1]
        parameters += last["paper_bits_up"] / (32 * problem.dimension * rounds) / seeds
        layers += last["layers_sent"] / seeds
    return spread(values), parameters, layers


def layers(rounds: int = 60, seeds: int = 3) -> list[Row]:
    """Fewer layers up: OPU3, OPU2, LowerB against everything."""
    rows = []
    for rule, keep in (("full", 1.0), ("opu3", 0.9), ("opu2", 0.9), ("lowerb", 0.9)):
        found: dict[str, Any] = {"layers": rule, "keep": keep}
        for split in SPLITS:
            found[split], parameters, share = measure(split, rounds, seeds, layers=rule, keep=keep)
        rows.append({**found, "uplink parameters": parameters, "uplink layers": share})
    return show(f"FedP3: accuracy in %, {rounds} rounds, {seeds} seeds", rows)


def keep_ratio(rounds: int = 60, seeds: int = 2) -> list[Row]:
    """Stronger pruning on the way down."""
    rows = []
    for rule in ("opu3", "opu2", "lowerb"):
        found: dict[str, Any] = {"layers": rule}
        for keep in (1.0, 0.9, 0.7, 0.5):
            found[f"keep {keep}"] = measure("S1", rounds, seeds, layers=rule, keep=keep)[0]
        rows.append(found)
    return show(f"FedP3, S1: accuracy in %, {rounds} rounds, {seeds} seeds", rows)


def variants(rounds: int = 60, seeds: int = 2) -> list[Row]:
    """Local pruning, server pruning, aggregation and layer rules, one at a time."""
    tried: dict[str, dict[str, Any]] = {
        "OPU2, fixed": {"layers": "opu2"},
        "OPU2, uniform q >= 0.5": {"layers": "opu2", "local_prune": "uniform", "q_min": 0.5},
        "OPU2, ordered q >= 0.5": {"layers": "opu2", "local_prune": "ordered", "q_min": 0.5},
        "OPU2, unassigned layers frozen": {"layers": "opu2", "train_unassigned": False},
        "OPU2, same mask every round": {"layers": "opu2", "fixed_mask": True},
        "LowerB keep 0.5, random": {"layers": "lowerb", "keep": 0.5},
        "LowerB keep 0.5, magnitude": {"layers": "lowerb", "keep": 0.5, "prune": "magnitude"},
        "LowerB keep 0.5, ordered": {"layers": "lowerb", "keep": 0.5, "prune": "ordered"},
    }
    for rule in ("opu1-2-3", "opu2-3"):
        for kind in ("simple", "weighted", "attention"):
            tried[f"{rule.upper()}, {kind}"] = {"layers": rule, "aggregation": kind}
    rows = [
        {"variant": label, "accuracy": measure("S1", rounds, seeds, **options)[0]}
        for label, options in tried.items()
    ]
    return show(f"FedP3 variants, S1: accuracy in %, {rounds} rounds, {seeds} seeds", rows)


def privacy(seeds: int = 3) -> list[Row]:
    """Softmax regression on digits, 4 clients: accuracy against epsilon at delta = 1e-4."""
    data = load("digits")
    unit = lambda x: x / x.norm(dim=1, keepdim=True)  # noqa: E731
    assert data.test_x is not None
    data = replace(data, x=unit(data.x), test_x=unit(data.test_x))
    rows = []
    for target in (None, 32.0, 8.0, 2.0, 1.0):
        found: dict[str, Any] = {"epsilon": "no noise" if target is None else target}
        for sketch in (True, False):
            values = []
            for seed in range(seeds):
                problem = make_problem(data, clients=4, l2=0.0, seed=seed)
                algorithm = build("ldp-fedp3", epsilon=target, delta=1e-4, gamma=2.0, sketch=sketch)
                result = simulate(algorithm, problem, 150, seed=seed, evaluate_every=150)
                values.append(result.history[-1]["accuracy"])
            found["d/n coordinates each" if sketch else "all coordinates, mean"] = spread(values)
            found["noise multiplier"] = result.algorithm.multiplier  # type: ignore[attr-defined]
        rows.append(found)
    return show(f"LDP-FedP3: accuracy in %, 150 steps, {seeds} seeds", rows)


EXPERIMENTS: dict[str, Experiment] = {
    "fedp3-layers": layers,
    "fedp3-keep": keep_ratio,
    "fedp3-variants": variants,
    "ldp-fedp3": privacy,
}

if __name__ == "__main__":
    main(EXPERIMENTS)
