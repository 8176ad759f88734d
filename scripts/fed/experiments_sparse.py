"""Sparse-ProxSkip's comparisons (its Tables 1 to 4): digits, MNIST, BlogFeedback, a network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from history_report import Report, kbit
from torch import Tensor

from symprune.fed.algorithms import build
from symprune.fed.compare.runs import Entry, Setting, summary, tune_options
from symprune.fed.problems.datasets import Dataset, load
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import simulate

SPARSE = {
    "sparse-proxskip": "Sparse-ProxSkip",
    "sparse-proxskip-local": "Sparse-ProxSkip-Local",
    "accelerated-server-pruning": "Accelerated-Server-Pruning",
    "fedht": "FedHT",
    "fediht": "FedIHT",
    "final-topk": "Final-TopK",
}
ABLATION = {
    "accelerated-server-pruning-modified": "Server-Pruning-modified",
    "sparse-proxskip-modified": "Sparse-ProxSkip-modified",
}


def sparse_digits(report: Report) -> None:
    """Sparse-ProxSkip's tables on digits: accuracy at 80, 90, 95 % and bits to an accuracy."""
    problem = make_problem("digits", split="class:2", clients=10, l2=1e-3)
    L = problem.constants().L_max
    grid = {"gamma": [1 / L, 3 / L], "p": [0.1, 0.3]}
    entries = _pruned({**SPARSE, **ABLATION}, grid)
    setting = Setting(120, (), "accuracy", 2)
    _sparse_tables(report, problem, entries, setting, (0.8, 0.9, 0.95), (0.7, 0.8, 0.85))


def sparse_mnist(report: Report) -> None:
    """The same on MNIST in place of FEMNIST: 30 clients, Dirichlet(0.3), 3000 images, d = 7850."""
    data = load("mnist")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:3000]
    problem = make_problem(data.take(order), split="dirichlet:0.3", clients=30, l2=1e-3)
    L = problem.constants().L_max
    grid = {"gamma": [1 / L, 3 / L, 6 / L], "p": [0.2]}
    setting = Setting(80, (), "accuracy", 2)
    _sparse_tables(report, problem, _pruned(SPARSE, grid), setting, (0.9, 0.98), (0.6, 0.7, 0.75))


def blogfeedback(report: Report) -> None:
    """Sparse linear regression on BlogFeedback, 554 clients: test R2 by sparsity, bits to an R2."""
    setting = Setting(100, (), "r2", 4, tuning_rounds=20, clients_at_once=16)
    _blogfeedback(report, 554, [0.02, 0.1], setting, (0.9, 0.95, 0.8), (0.1, 0.15, 0.2))


def blogfeedback_short(report: Report) -> None:
    """The same with half of the rounds: an hour of processor time for three seeds."""
    setting = Setting(50, (), "r2", 2, tuning_rounds=20, clients_at_once=16)
    _blogfeedback(report, 554, [0.02, 0.1], setting, (0.9, 0.95, 0.8), (0.1, 0.15))


def blogfeedback_60(report: Report) -> None:
    """The same with 60 of the clients, 10 local steps a round and 90 % sparsity: two minutes."""
    setting = Setting(60, (), "r2", 2)
    _blogfeedback(report, 60, [0.1], setting, (0.9,), (0.03, 0.05, 0.075))


def _blogfeedback(
    report: Report,
    clients: int,
    chances: list[float],
    setting: Setting,
    sparsities: tuple[float, ...],
    targets: tuple[float, ...],
) -> None:
    """The paper prints a ridge alpha/4 = 250 in every client's sum; its losses and R2 only come out
    when it counts once for all 554 clients, so each client has 250/554."""
    data = load("blogfeedback")
    problem = make_problem(data, split="user", clients=clients, l2=500 / 554, weighting="sum")
    L = problem.constants().L_max
    largest = float(problem.mean_gradient(problem.initial()).abs().max())
    grid = {"gamma": [1 / L, 1.9 / L], "p": chances}
    lasso = {**grid, "l1": [share * largest for share in (0.01, 0.03, 0.1)]}
    entries = [*_pruned(SPARSE, grid), Entry("randprox-l1", {}, lasso, "RandProx-l1")]
    _sparse_tables(report, problem, entries, setting, sparsities, targets)


def sparse_a9a(report: Report) -> None:
    """Why the lowest loss is not the highest accuracy: a9a at 95 %, 8000 held-out rows."""
    data = load("a9a")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    test = order[8000:16000]
    data = replace(data.take(order[:8000]), test_x=data.x[test], test_y=data.y[test])
    for split in ("label-ramp", "iid"):
        problem = make_problem(data, split=split, clients=10, l2=1e-3)
        mean, rows = positive_share(problem), float((data.y > 0).double().mean())
        shift = math.log(mean / (1 - mean)) - math.log(rows / (1 - rows))
        L = problem.constants().L_max
        grid = {"gamma": [1 / L, 3 / L], "p": [0.2]}
        entries = [
            replace(e, options={**e.options, "sparsity": 0.95}) for e in _pruned(SPARSE, grid)
        ]
        setting = Setting(100, (), "accuracy", 20)
        table = []
        for entry in entries:
            options = tune_options(problem, entry, setting, report.say)
            found = []
            for seed in report.seeds:
                algorithm = build(entry.algorithm, **options)
                result = simulate(algorithm, problem, 100, seed=seed, evaluate_every=100)
                assert data.test_x is not None
                scores = data.test_x.to(result.model.dtype) @ result.model
                at_zero, at_shift = (accuracy_at(t, scores, data) for t in (0.0, shift))
                positive = float((scores >= 0).double().mean())
                found.append((result.history[-1]["loss"], at_zero, positive, at_shift))
            table.append([entry.title, *([f[i] for f in found] for i in range(4))])
        report.table(
            f"a9a, {split}, 95 %: positive {mean:.2f} in the clients' mean, {rows:.2f} of the rows",
            ["method", "loss", "accuracy", "called positive", f"accuracy at {shift:.2f}"],
            table,
        )


def accuracy_at(threshold: float, scores: Tensor, data: Dataset) -> float:
    """Of the test rows when scores from this threshold on are called positive."""
    assert data.test_y is not None
    return float(((scores >= threshold) == (data.test_y > 0)).double().mean())


def positive_share(problem: Problem) -> float:
    """Of positive rows, in the mean over clients that is trained on."""
    rows = problem.rows
    return float(((rows.y > 0) * rows.weights).sum() / rows.weights.sum())


def sparse_network(report: Report) -> None:
    """Nonconvex: an MLP on digits at 90 % sparsity, batch 32, clip 10, learning rate tuned."""
    setting = Setting(80, (), "accuracy", 4)
    grid: dict[str, list[float]] = {"gamma": [0.05, 0.1, 0.2, 0.4]}
    problem = make_problem("digits", model="mlp", split="class:2", clients=10, l2=1e-4)
    fixed = {"p": 1 / 16, "batch": 32, "clip": 10.0, "sparsity": 0.9}
    entries = [Entry(n, fixed, grid, title) for n, title in SPARSE.items()]
    lines = report.compare("network", problem, entries, setting, "network")
    rows = [
        [line.entry.title, line.entry.options["gamma"], line.final("accuracy"), line.final("loss")]
        for line in lines
    ]
    columns = ["method", "gamma", "test accuracy", "training loss"]
    report.table(f"MLP 64-64-10, 90 % sparsity, {setting.rounds} rounds", columns, rows)
    report.picture(lines, "accuracy", problem, "90", title="MLP on digits, 90 % sparsity")


def _pruned(methods: dict[str, str], grid: dict[str, list[float]]) -> list[Entry]:
    """Every method with the same grid."""
    return [Entry(name, {}, grid, title) for name, title in methods.items()]


def _sparse_tables(
    report: Report,
    problem: Problem,
    entries: list[Entry],
    setting: Setting,
    sparsities: tuple[float, ...],
    targets: tuple[float, ...],
) -> None:
    """The shape of the paper's Tables 1 to 4: a final metric and the upload to reach a level."""
    metric = setting.metric
    for sparsity in sparsities:
        level = f"{100 * sparsity:g}"
        pruned = [replace(e, options={**e.options, "sparsity": sparsity}) for e in entries]
        lines = report.compare(problem.name, problem, pruned, setting, level)
        rows = []
        for line in lines:
            options = line.entry.options
            costs = [kbit(line, metric, target) for target in targets]
            final = [line.final(metric), line.final("loss")]
            rows.append([line.entry.title, *final, *costs, options["gamma"], options["p"]])
        report.table(
            f"{problem.name}, {level} % sparsity, {setting.rounds} rounds: {metric}, kbit up to it",
            ["method", metric, "loss", *(f"to {t:g}" for t in targets), "gamma", "p"],
            rows,
        )
        report.data[f"summary-{level}"] = summary(lines, metric, list(targets), problem.clients)
        title = f"{problem.name}, {level} % sparsity"
        report.picture(lines, metric, problem, level, unit="bytes_up", title=title)


EXPERIMENTS: dict[str, Callable[[Report], None]] = {
    "sparse-digits": sparse_digits,
    "sparse-mnist": sparse_mnist,
    "sparse-network": sparse_network,
    "sparse-a9a": sparse_a9a,
    "blogfeedback": blogfeedback,
    "blogfeedback-short": blogfeedback_short,
    "blogfeedback-60": blogfeedback_60,
}
