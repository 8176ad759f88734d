"""Scafflix's comparisons (thesis chapter 3 and appendix B): rounds against alpha and splits of the
convex problems, and networks against FLIX by SGD, FedAvg and Ditto."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from experiment_tables import Experiment, Row
from history_report import Report
from image_runs import IMAGES, Method, image_clients, image_table, some_rows

from symprune.fed.algorithms import build
from symprune.fed.compare.plots import plot_values
from symprune.fed.problems.datasets import load
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.optimum import minimise
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import simulate


def scafflix(report: Report) -> None:
    """Rounds to a gap of 1e-6 for alpha in 0.1, ..., 1: Scafflix, a global step, FLIX by GD."""
    columns = ["Scafflix", "Scafflix, global step", "FLIX by GD"]
    for name in ("mushrooms", "a9a", "w8a"):
        data = load(name)
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:4000]
        problem = make_problem(
            data.take(order), split="label-ramp", clients=10, l2=0.1, dtype="float64"
        )
        kappa = problem.constants().kappa_max
        rows = []
        for alpha in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
            row: list[Any] = [alpha]
            for method, options in (
                ("scafflix", {}),
                ("scafflix", {"individual": False}),
                ("flix-gd", {}),
            ):
                seeds = report.seeds if method == "scafflix" else report.seeds[:1]
                row.append([_rounds(problem, method, alpha, s, options) for s in seeds])
            rows.append(row)
            report.say(f"{name}: alpha {alpha}")
        report.data[name] = rows
        report.table(
            f"{name}, 10 clients by label, mu = 0.1, kappa_max = {kappa:.0f}: rounds to 1e-6",
            ["alpha", *columns],
            rows,
        )
        series = {c: [row[i] for row in rows] for i, c in enumerate(columns, 1)}
        path = report.output / f"scafflix-{name}.png"
        labels = ("alpha (1: one model for all)", "rounds to a gap of 1e-6")
        plot_values([row[0] for row in rows], series, path, labels, f"{name}, 10 clients by label")


_TARGETS: dict[tuple[int, float], float] = {}


def _rounds(
    problem: Problem, method: str, alpha: float, seed: int, options: dict[str, Any]
) -> int | None:
    """Rounds until the FLIX objective is within 1e-6 of its lowest value."""
    x0 = torch.ones(problem.dimension, dtype=torch.float64)
    algorithm = build(method, alpha=alpha, tolerance=1e-9, **options)
    key = (id(problem), alpha)
    if key not in _TARGETS:
        start = simulate(build("flix-gd", alpha=alpha, tolerance=1e-9), problem, 0, x0=x0)
        centres = start.client.get("centre", torch.zeros(problem.clients, problem.dimension))
        a = torch.full((problem.clients,), alpha, dtype=torch.float64)
        best = minimise(problem, a, centres.double())
        _TARGETS[key] = float(problem.value(alpha * best + (1 - alpha) * centres).mean())
    lowest = _TARGETS[key]
    run = simulate(
        algorithm,
        problem,
        2000,
        seed=seed,
        x0=x0,
        stop=lambda record: bool(record["personal_loss"] - lowest < 1e-6),
    )
    last = run.history[-1]
    return last["round"] if last["personal_loss"] - lowest < 1e-6 else None


def scafflix_splits(report: Report) -> None:
    """Figs. B.4 to B.6: rounds to 1e-6 on iid, label, feature and quantity splits."""
    rows: list[list[Any]] = []
    for name in ("mushrooms", "a9a", "w8a"):
        data = some_rows(load(name), 2000)
        for split in ("iid", "label-ramp", "cluster", "quantity:0.5"):
            problem = make_problem(data, split=split, clients=10, l2=0.1, dtype="float64")
            row: list[Any] = [name, split, problem.constants().kappa_max]
            for method, seeds in (("scafflix", report.seeds), ("flix-gd", (0,))):
                for alpha in (0.1, 0.5, 1.0):
                    row.append([_rounds(problem, method, alpha, s, {}) for s in seeds])
            rows.append(row)
            report.say(f"{name}: {split}")
    methods = [f"{m} {a}" for m in ("Scafflix", "GD") for a in (0.1, 0.5, 1.0)]
    columns = ["data", "split", "kappa_max", *methods]
    report.table("10 clients, mu = 0.1: rounds to 1e-6 by method and alpha", columns, rows)


MIXED = {"cohort_size": 10, "batch": 20, "local_epochs": 50, "local_lr": 0.1}
RATES = (0.03, 0.1, 0.3)


def scafflix_images() -> list[Row]:
    """Figs. 3.2 and B.1 and Table B.1 on MNIST and Fashion-MNIST: an MLP, clients' own tests."""
    plain = {"cohort_size": 10, "batch": 20}
    methods = [
        Method("FedAvg", "fedavg", {**plain, "p": 0.2}, ("gamma", RATES)),
        Method("Ditto", "ditto", plain, ("lr", RATES)),
        Method("FLIX by SGD, 0.5", "flix-sgd", {**MIXED, "alpha": 0.5}, ("eta", (0.3, 1, 3))),
    ]
    for alpha in (0.1, 0.3, 0.5, 0.7, 0.9):
        options = {**MIXED, "alpha": alpha, "p": 0.2}
        methods.append(Method(f"Scafflix, {alpha:g}", "scafflix", options, ("gamma", RATES)))
    rows = []
    for name in IMAGES:
        problem = image_clients(name, "mlp:64")
        rows += image_table(f"{name}, MLP 784-64-10, 20 clients", problem, methods, (10, 40))
    return rows


def scafflix_ablation() -> list[Row]:
    """Fig. 3.3 on MNIST: clients a round, communication probability, epochs for the own optimum."""
    base = {**MIXED, "alpha": 0.3, "p": 0.2, "gamma": 0.1}
    tried: dict[str, dict[str, Any]] = {f"tau = {t}": {"cohort_size": t} for t in (1, 5, 10, 20)}
    tried |= {f"p = {p}": {"p": p} for p in (0.1, 0.2, 0.5)}
    tried |= {f"{e} local epochs": {"local_epochs": e} for e in (1, 5, 200)}
    methods = [Method(label, "scafflix", {**base, **o}) for label, o in tried.items()]
    problem = image_clients("mnist", "mlp:64")
    return image_table("mnist, Scafflix 0.3, one thing changed", problem, methods, (10, 40))


def scafflix_text() -> list[Row]:
    """Figs. 3.2 and B.2 on text: the next character by an LSTM, a client per file."""
    data = load("characters")
    assert data.users is not None
    kept = torch.cat([(data.users == u).nonzero()[:200, 0] for u in data.users.unique()])
    model, clients = "character-lstm", len(data.users.unique())
    problem = make_problem(
        data.take(kept), model, "user", clients=clients, l2=0.0, client_test_share=0.3
    )
    own = {"batch": 20, "local_epochs": 20, "local_lr": 1.0, "local_batch": 20}
    methods = [
        Method("FedAvg", "fedavg", {"batch": 20, "p": 0.2, "gamma": 1.0}),
        Method("FLIX by SGD, 0.5", "flix-sgd", {**own, "alpha": 0.5, "eta": 3.0}),
        *(
            Method(f"Scafflix, {a}", "scafflix", {**own, "alpha": a, "p": 0.2, "gamma": 1.0})
            for a in (0.1, 0.3, 0.5)
        ),
    ]
    return image_table(f"Next character, {clients} files", problem, methods, (30,))


EXPERIMENTS: dict[str, Callable[[Report], None]] = {
    "scafflix": scafflix,
    "scafflix-splits": scafflix_splits,
}
NETWORKS: dict[str, Experiment] = {
    "scafflix-text": scafflix_text,
    "scafflix-images": scafflix_images,
    "scafflix-ablation": scafflix_ablation,
}
