"""The federated papers' comparisons, small but real: tuned steps, several seeds, table and plot.

    python scripts/fed_reproduce.py EXPERIMENT [--output out/fed] [--seeds 3]

Experiments that need data take it from the folder of SYMPRUNE_ASSETS. Every method of a comparison
is tuned on the same grid by its training loss, with a seed that is not reported.
`docs/federated.md` reads the results.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fed_experiments_cohort
import fed_experiments_fedp3
import fed_experiments_fedspa
import fed_experiments_fedsparse
import fed_experiments_similarity
import torch
from fed_tables import Experiment

from symprune.errors import SympruneError
from symprune.fed.compare import Entry, Line, Setting, first_crossing, run_entry, summary
from symprune.fed.data import Dataset, load
from symprune.fed.plots import plot, plot_values
from symprune.fed.problem import Problem
from symprune.fed.protocol import build
from symprune.fed.reference import minimise
from symprune.fed.simulate import simulate
from symprune.fed.tasks import make_problem

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


class Report:
    """Collects tables as Markdown, and writes them with the histories to the output folder."""

    def __init__(self, name: str, output: Path, seeds: int) -> None:
        self.name, self.output, self.seeds = name, output, tuple(range(seeds))
        self.parts: list[str] = []
        self.data: dict[str, Any] = {}
        self.begun = time.perf_counter()

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.begun:6.0f} s] {text}", file=sys.stderr, flush=True)

    def table(self, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        lines = [f"**{title}**", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(show(cell) for cell in row) + " |" for row in rows]
        self.parts.append("\n".join(lines))
        print("\n" + self.parts[-1], flush=True)

    def compare(
        self, title: str, problem: Problem, entries: list[Entry], setting: Setting, key: str
    ) -> list[Line]:
        """Run every entry; what is done is on disk before the next one begins."""
        setting = replace(setting, seeds=self.seeds)
        lines, done = [], self.data.setdefault(key, {})
        for entry in entries:
            line = run_entry(problem, entry, setting, self.say)
            done[line.entry.title] = {"options": line.entry.options, "histories": line.histories}
            lines.append(line)
            self.save()
        return lines

    def picture(
        self, lines: list[Line], metric: str, problem: Problem, key: str, **how: Any
    ) -> None:
        path = self.output / f"{self.name}-{key}.png"
        plot(lines, metric, problem.clients, path, **how)

    def save(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        (self.output / f"{self.name}.md").write_text("\n\n".join(self.parts) + "\n")
        (self.output / f"{self.name}.json").write_text(json.dumps(self.data))


def ef_bv(report: Report) -> None:
    """EF-BV against EF21: bits to accuracy on mushrooms, a9a and w8a, comp-(k, d/2)."""
    cases = (("mushrooms", 2, 400), ("a9a", 2, 400), ("w8a", 2, 200))
    for name, k, rounds in cases:
        problem = make_problem(_unit_rows(load(name)), clients=1000, l2=0.1)
        optimum = minimise(_double(problem)).float()
        compressor = f"comp:{k},{problem.dimension // 2}"
        theory = {
            method: build(method, compressor=compressor).prepare(problem.constants())
            for method in ("ef-bv", "ef21")
        }
        entries = []
        for method, prepared in theory.items():
            gamma = prepared.gamma  # type: ignore[attr-defined]
            options = {"compressor": compressor}
            entries.append(Entry(method, {**options, "gamma": gamma}, label=f"{method}, theory"))
            grid = [gamma * 2**e for e in range(5, 10)]
            entries.append(Entry(method, options, {"gamma": grid}, f"{method}, tuned"))
        setting = Setting(rounds, (), "gap", 25, optimum)
        lines = report.compare(name, problem, entries, setting, f"{name}-{k}")
        rows = []
        for line in lines:
            costs = [_kbit(line, "gap", gap) for gap in (1e-2, 1e-3, 1e-4)]
            rows.append([line.entry.title, line.entry.options["gamma"], *costs, line.final("gap")])
        report.table(
            f"{name}, n = 1000, d = {problem.dimension}, comp-({k}, d/2): kbit up to a gap",
            ["method", "gamma", "1e-2", "1e-3", "1e-4", f"gap after {rounds} rounds"],
            rows,
        )
        title = f"{name}, comp-({k}, d/2), 1000 nodes"
        report.picture(lines, "gap", problem, f"{name}-{k}", unit="paper_bits_up", title=title)


def ef_bv_theory(report: Report) -> None:
    """EF-BV against EF21 with the theorems' steps, nothing tuned: breast cancer, 250 nodes."""
    problem = make_problem("breast-cancer", clients=250, l2=0.1, dtype="float64")
    options = {"compressor": "comp:2,15"}
    entries = [Entry(method, options, label=method) for method in ("ef-bv", "ef21")]
    setting = Setting(3200, (), "gap", 25, minimise(problem))
    lines = report.compare("theory", problem, entries, setting, "theory")
    gaps = (1e-2, 1e-4, 1e-6)
    rows = [[line.entry.title, *(_kbit(line, "gap", gap) for gap in gaps)] for line in lines]
    columns = ["method", "1e-2", "1e-4", "1e-6"]
    report.table("breast cancer, comp-(2, 15), theory's steps: kbit up to a gap", columns, rows)
    report.picture(lines, "gap", problem, "gap", unit="paper_bits_up", title=problem.name)


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
    """The same with half of the rounds: 25 minutes of processor time for one seed."""
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


def sparse_network(report: Report) -> None:
    """Nonconvex: an MLP on digits at 90 % sparsity, batch 32, clip 10, learning rate tuned."""
    setting = Setting(80, (), "accuracy", 4, tuning_rounds=20)
    _sparse_network(report, {"gamma": [0.05, 0.1]}, setting)


def sparse_network_short(report: Report) -> None:
    """The same with a learning rate of 0.1 for every method and half of the rounds."""
    _sparse_network(report, {"gamma": [0.1]}, Setting(40, (), "accuracy", 4, tuning_rounds=1))


def _sparse_network(report: Report, grid: dict[str, list[float]], setting: Setting) -> None:
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
            costs = [_kbit(line, metric, target) for target in targets]
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


def _kbit(line: Line, metric: str, target: float) -> list[float | None]:
    """The paper's kbit (32 a value) per client at the first crossing, per seed."""
    records = [first_crossing(history, metric, target) for history in line.histories]
    return [None if record is None else record["paper_bits_up"] / 1000 for record in records]


def _unit_rows(data: Dataset) -> Dataset:
    """Rows of unit length: every client is then about equally smooth, and steps are not tiny."""
    return replace(data, x=data.x / data.x.norm(dim=1, keepdim=True).clamp_min(1e-12))


def _double(problem: Problem) -> Problem:
    return replace(problem, rows=problem.rows.to(torch.float64))


def show(cell: Any) -> str:
    """Numbers of several seeds as mean ± standard deviation, or that some never got there."""
    if not isinstance(cell, list):
        return f"{cell:.3g}" if isinstance(cell, float) else str(cell)
    if any(value is None for value in cell):
        return "never" if all(value is None for value in cell) else "not always"
    mean = sum(cell) / len(cell)
    spread = (sum((v - mean) ** 2 for v in cell) / max(1, len(cell) - 1)) ** 0.5
    if not 1e-3 <= abs(mean) < 1e6:
        return f"{mean:.1e}"
    decimals = max(0, 2 - math.floor(math.log10(abs(mean))))
    return f"{mean:.{decimals}f}" + (f" ± {spread:.{decimals}f}" if spread else "")


EXPERIMENTS: dict[str, Callable[[Report], None]] = {
    "ef-bv": ef_bv,
    "ef-bv-theory": ef_bv_theory,
    "sparse-digits": sparse_digits,
    "sparse-mnist": sparse_mnist,
    "sparse-network": sparse_network,
    "sparse-network-short": sparse_network_short,
    "blogfeedback": blogfeedback,
    "blogfeedback-short": blogfeedback_short,
    "blogfeedback-60": blogfeedback_60,
    "scafflix": scafflix,
}

FAMILIES: dict[str, Experiment] = {
    **fed_experiments_cohort.EXPERIMENTS,
    **fed_experiments_fedsparse.EXPERIMENTS,
    **fed_experiments_fedspa.EXPERIMENTS,
    **fed_experiments_fedp3.EXPERIMENTS,
    **fed_experiments_similarity.EXPERIMENTS,
}
"""Experiments that print their tables and choose their own seeds."""


def _first_line(work: Callable[..., Any]) -> str:
    return (work.__doc__ or "").strip().partition("\n")[0]


def main() -> None:
    everything = {**EXPERIMENTS, **FAMILIES}
    listing = "\n".join(f"  {name:24}{_first_line(w)}" for name, w in everything.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=listing, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=[*everything, "all"], metavar="EXPERIMENT")
    parser.add_argument("--output", type=Path, default=Path("out/fed"))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    chosen = list(everything) if arguments.experiment == "all" else [arguments.experiment]
    try:
        for name in chosen:
            if name in FAMILIES:
                FAMILIES[name]()
                continue
            report = Report(name, arguments.output, arguments.seeds)
            EXPERIMENTS[name](report)
            report.save()
    except SympruneError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
