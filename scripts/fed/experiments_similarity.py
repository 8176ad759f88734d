"""Similarity network: what fusing similar clients brings, and what compressing gradients costs.

`python scripts/fed/experiments_similarity.py [similarity-labels similarity-regression ...]`
The source has no experiments; these are the project's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from experiment_tables import Experiment, Row, main, show
from torch import Tensor

from symprune.fed.algorithms import build
from symprune.fed.algorithms.similarity_network.graph import (
    nearest_neighbours,
    sketch,
    squared_distances,
)
from symprune.fed.problems.losses import Linear
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.problems.synthetic import hidden_clusters
from symprune.fed.protocol import Turn
from symprune.fed.simulate import Result, simulate

PLAIN = {"denoise": 0.0, "values": 0}
SEEDS = (0, 1, 2)


def clustered(seed: int) -> tuple[Problem, Tensor]:
    """Regression, 30 clients in 3 clusters: 10 shared and 10 cluster-specific coefficients, 12
    rows each, noise 0.5; and the true coefficients of every client."""
    r = np.random.default_rng(seed)
    shared, own = r.standard_normal(10), r.standard_normal((3, 10))
    truth = np.stack([np.concatenate([shared, own[n % 3]]) for n in range(30)])
    parts = []
    for n in range(30):
        x = r.standard_normal((12, 20))
        y = x @ truth[n] + 0.5 * r.standard_normal(12)
        parts.append((torch.from_numpy(x), torch.from_numpy(y)))
    return Problem(Linear(20), stack_rows(parts), name="regression"), torch.from_numpy(truth)


def inside(problem: Problem, space: str, clusters: int) -> float:
    """Share of edges that join clients of the same hidden cluster."""
    turn = Turn(0, 0, problem.clients, torch.arange(problem.clients))
    edges = nearest_neighbours(squared_distances(sketch(problem, space, turn)), 4)
    return float((edges[:, 0] % clusters == edges[:, 1] % clusters).double().mean())


def run(problem: Problem, rounds: int, **options: Any) -> Result:
    algorithm = build("similarity-network", **options)
    return simulate(algorithm, problem, rounds, evaluate_every=rounds)


def labels() -> list[Row]:
    """Mean personal accuracy per seed against the strength of the fusion."""
    problems = [hidden_clusters(seed) for seed in SEEDS]
    table: list[Row] = []
    for personal, eta in (("bias", 1.0), ("all", 0.5)):
        row: Row = {"personal": personal}
        for lam in (0.0, 3e-4, 1e-3, 3e-3, 1e-2):
            options = {"personal": personal, "lam": lam, "eta": eta, **PLAIN}
            last = [run(p, 120, **options).history[-1] for p in problems]
            row[f"lam {lam:g}"] = " ".join(f"{r['personal_accuracy']:.3f}" for r in last)
        table.append(row)
    last = [run(p, 120, personal="none", eta=1.0, **PLAIN).history[-1] for p in problems]
    table[0]["global"] = " ".join(f"{r['personal_accuracy']:.3f}" for r in last)
    show("Unbalanced labels: personal test accuracy, seeds 0 1 2", table)
    graph = [
        {"space": s, "edges inside a cluster": " ".join(f"{inside(p, s, 4):.2f}" for p in problems)}
        for s in ("data", "model", "feature")
    ]
    return table + show("Quality of the graph by space (chance 0.22)", graph)


def error(result: Result, problem: Problem, truth: Tensor) -> float:
    """Mean squared error on fresh rows: coefficients' error plus the noise 0.25."""
    models = result.algorithm.personal_models(result.server, result.client, problem)
    assert models is not None
    return float((models - truth).square().sum(1).mean()) + 0.25


def regression() -> list[Row]:
    """Test error of alone, pooled, shared plus own part, fused; then the compressor."""
    tasks = [clustered(seed) for seed in SEEDS]
    rule = {"space": "model", "eta": 0.1, "eta_personal": 3.0, **PLAIN}
    table = []
    for label, options in (
        ("alone (ridge 0.1)", {"personal": "only", "lam": 0.0, "l2": 0.1}),
        ("pooled", {"personal": "none"}),
        ("shared + own, lam 0", {"personal": "10:20", "lam": 0.0}),
        ("fused, lam 3e-3, p 2", {"personal": "10:20", "lam": 3e-3}),
        ("fused, lam 3e-3, p 1", {"personal": "10:20", "lam": 3e-3, "p": 1.0}),
        ("fused, lam 3e-3, p inf", {"personal": "10:20", "lam": 3e-3, "p": float("inf")}),
    ):
        chosen = dict(options)
        l2 = float(chosen.pop("l2", 0.0))  # type: ignore[arg-type]
        errors = [
            error(run(replace(p, l2=l2), 300, **rule, **chosen), p, truth) for p, truth in tasks
        ]
        table.append({"method": label, "test MSE": " ".join(f"{e:.2f}" for e in errors)})
    return show("Clustered regression: test MSE, seeds 0 1 2 (noise 0.25)", table)


def compressor() -> list[Row]:
    """Objective gap to the uncompressed run's end, and uplink bits against raw gradients."""
    problem, _ = clustered(0)
    rule = {"space": "model", "eta": 0.1, "eta_personal": 3.0, "personal": "10:20", "lam": 3e-3}
    value = lambda r: r["personal_loss"] + r["fusion"]  # noqa: E731
    best = value(run(problem, 900, **rule, **PLAIN).history[-1])
    raw, table = 0.0, []
    for label, options in (
        ("raw", PLAIN),
        ("fused lasso 0.1", {"values": 0, "error_feedback": False}),
        ("fused lasso 0.1, error feedback", {"values": 0}),
        ("4 values", {"denoise": 0.0, "error_feedback": False}),
        ("4 values, error feedback", {"denoise": 0.0}),
        ("fused lasso 0.1, 4 values, error feedback", {}),
    ):
        last = run(problem, 300, **rule, **options).history[-1]
        bits = last["paper_bits_up"]
        raw = raw or bits
        row = {"uplink": label, "gap": value(last) - best, "bits / raw": bits / raw}
        table.append({**row, "encoded MB": last["bytes_up"] / 1e6})
    return show("Compressed gradients on clustered regression, 300 rounds", table)


def digits() -> list[Row]:
    """Softmax on digits, two classes per client: which part is personal, how strongly fused."""
    problem = make_problem(
        "digits", split="class:2", clients=30, client_test_share=0.4, l2=1e-3, dtype="float64"
    )
    table = []
    for personal in ("bias", "all"):
        for lam in (0.0, 1e-4, 1e-3, 1e-2):
            last = run(problem, 100, personal=personal, lam=lam, **PLAIN).history[-1]
            row = {"personal": personal, "lam": lam, "accuracy": last["personal_accuracy"]}
            table.append({**row, "clusters": last["clusters"]})
    last = run(problem, 100, personal="none", **PLAIN).history[-1]
    table.append({"personal": "none (global)", "accuracy": last["personal_accuracy"]})
    return show("digits, two classes per client, 30 clients: personal accuracy", table)


EXPERIMENTS: dict[str, Experiment] = {
    "similarity-labels": labels,
    "similarity-regression": regression,
    "similarity-compressor": compressor,
    "similarity-digits": digits,
}

if __name__ == "__main__":
    main(EXPERIMENTS)
