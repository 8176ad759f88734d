"""FedSparse: accuracy, bytes and sparsity against FedAvg, FedL1 and FedDrop on digits, 30 clients.

`python scripts/fed/experiments_fedsparse.py [fedsparse fedsparse-variants fedsparse-scaffold]`
"""

from __future__ import annotations

from functools import partial
from statistics import mean
from typing import Any

import torch
from experiment_tables import Experiment, Row, main, show

from symprune.fed.algorithms import build
from symprune.fed.problems.datasets import load
from symprune.fed.problems.losses import Module
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.networks import mlp
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import Result, simulate

ROUNDS, BUDGET = 60, 37e6
SHARED = {"cohort_size": 10, "batch": 8, "server_lr": 5e-3}
GATED = {
    **SHARED,
    "exempt": ("output",),
    "temperature": 3e-3,
    "gate_lr": 1e-2,
    "server_gate_lr": 2e-2,
}


def digits(seed: int) -> Problem:
    """MLP 64-200-10, Dirichlet(0.5) labels, a quarter of every client's rows held out."""
    problem = make_problem(
        "digits",
        model="mlp",
        split="dirichlet:0.5",
        clients=30,
        l2=0.0,
        seed=seed,
        client_test_share=0.25,
    )
    wide = Module(partial(mlp, tuple(load("digits").x.shape[1:]), 10, 200))
    return Problem(wide, problem.rows, 0.0, 0.0, problem.test, problem.client_test, name="digits")


def spent(record: Row, clients: int) -> float:
    """Bytes as the paper counts them, both directions."""
    return clients * (record["paper_bits_up"] + record["paper_bits_down"]) / 8


def summary(label: str, results: list[Result], clients: int) -> Row:
    """Means over seeds at the end, the sparsity of hidden units at round 20, and the accuracy that
    the byte budget buys. Every fourth round is evaluated."""
    last = [r.history[-1] for r in results]
    bought = [
        max((r["round"], r["accuracy"]) for r in result.history if spent(r, clients) <= BUDGET)[1]
        for result in results
    ]
    row: Row = {
        "method": label,
        "global": mean(r["accuracy"] for r in last),
        "local": mean(r["personal_accuracy"] for r in last),
        "MB": mean(spent(r, clients) for r in last) / 1e6,
        "MB encoded": mean(r["bytes_up"] + r["bytes_down"] for r in last) / 1e6,
    }
    if "groups_pruned" in last[0]:
        row["pruned"] = mean(r["groups_pruned"] for r in last)
        row["at round 20"] = mean(res.history[5]["groups_pruned"] for res in results)
    return {**row, f"global at {BUDGET / 1e6:.0f} MB": mean(bought)}


def compare(title: str, methods: list[tuple[str, str, dict[str, Any]]], seeds: int) -> list[Row]:
    table = []
    for label, name, options in methods:
        results = [
            simulate(build(name, **options), digits(seed), ROUNDS, seed=seed, evaluate_every=4)
            for seed in range(seeds)
        ]
        table.append(summary(label, results, 30))
    return show(title, table)


def fedsparse() -> list[Row]:
    """Gates per hidden unit at several prices, with and without pruning at the server."""
    methods: list[tuple[str, str, dict[str, Any]]] = [("FedAvg (server Adam)", "fedopt", SHARED)]
    methods += [
        (f"FedSparse, l0 {l0:g}", "fedsparse", {**GATED, "l0": l0}) for l0 in (2e-5, 1e-4, 3e-4)
    ]
    methods += [
        (
            "FedSparse, l0 1e-4, server keeps all",
            "fedsparse",
            {**GATED, "l0": 1e-4, "prune_at_server": False},
        ),
        ("FedL1, 2e-2", "fedl1", {**SHARED, "l1": 2e-2, "exempt": ("output",)}),
        ("FedDrop, 0.5", "feddrop", {**SHARED, "rate": 0.5}),
    ]
    return compare("FedSparse on digits, means of 3 seeds, 60 rounds", methods, 3)


def weights() -> list[Row]:
    """Single-weight gates, and the closed M-step with free probabilities."""
    fine = {**GATED, "gates": "weight", "temperature": 1e-3, "server_gate_lr": 0.1}
    free = {"cohort_size": 10, "batch": 8, "exempt": ("output",)}
    methods: list[tuple[str, str, dict[str, Any]]] = [
        ("weight gates, l0 1e-4", "fedsparse", {**fine, "l0": 1e-4}),
        ("weight gates, l0 1e-3", "fedsparse", {**fine, "l0": 1e-3}),
        ("closed form, l0 1e-4", "fedsparse-em", {**free, "l0": 1e-4}),
        ("closed form, l0 3e-4", "fedsparse-em", {**free, "l0": 3e-4}),
        (
            "closed form, weight gates, l0 1e-3",
            "fedsparse-em",
            {**free, "gates": "weight", "l0": 1e-3},
        ),
    ]
    return compare("Variants of FedSparse on digits, one seed, 60 rounds", methods, 1)


def scaffold() -> list[Row]:
    """With SCAFFOLD (appendix E): softmax regression, 50 clients of one class each, 400 rounds."""
    fine = {**SHARED, "gates": "weight", "gate_lr": 1e-2, "server_gate_lr": 5e-2, "l0": 1e-3}
    methods: list[tuple[str, str, dict[str, Any]]] = [
        ("FedAvg (server Adam)", "fedopt", SHARED),
        ("SCAFFOLD", "scaffold", SHARED),
        ("FedSparse", "fedsparse", fine),
        ("FedSparse + SCAFFOLD", "fedsparse-scaffold", fine),
    ]
    table = []
    for label, name, options in methods:
        histories = []
        for seed in range(3):
            problem = make_problem(
                "digits", split="class:1", clients=50, l2=0.0, seed=seed, client_test_share=0.25
            )
            # Gates measure magnitudes, so the weights start as those of a layer, not at zero.
            generator = torch.Generator().manual_seed(seed)
            x0 = (2 * torch.rand(problem.dimension, generator=generator) - 1) / 8
            algorithm = build(name, **options)
            run = simulate(algorithm, problem, 400, seed=seed, x0=x0, evaluate_every=100)
            histories.append(run.history)
        row: Row = {"method": label}
        for at, column in ((1, "global at 100"), (2, "at 200"), (4, "at 400")):
            row[column] = mean(history[at]["accuracy"] for history in histories)
        row["local"] = mean(history[-1]["personal_accuracy"] for history in histories)
        row["MB"] = mean(spent(history[-1], 50) for history in histories) / 1e6
        row["sparsity"] = mean(history[-1].get("sparsity", 0.0) for history in histories)
        table.append(row)
    return show("FedSparse and SCAFFOLD on digits, means of 3 seeds", table)


EXPERIMENTS: dict[str, Experiment] = {
    "fedsparse": fedsparse,
    "fedsparse-variants": weights,
    "fedsparse-scaffold": scaffold,
}

if __name__ == "__main__":
    main(EXPERIMENTS)
