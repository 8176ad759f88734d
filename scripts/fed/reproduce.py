"""The federated papers' comparisons, small but real: tuned steps, several seeds, table and plot.

    python scripts/fed/reproduce.py EXPERIMENT [--output out/fed] [--seeds 3]

Experiments that need data take it from the folder of SYMPRUNE_ASSETS. Every method of a comparison
is tuned on the same grid by its training loss, with a seed that is not reported.
`docs/federated.md` reads the results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import experiments_cohort
import experiments_fedp3
import experiments_fedspa
import experiments_fedsparse
import experiments_similarity
import experiments_sparse
import torch
from experiment_tables import Experiment
from history_report import Report, kbit

from symprune.cli import console
from symprune.fed.algorithms import build
from symprune.fed.compare.plots import plot_values
from symprune.fed.compare.runs import Entry, Setting
from symprune.fed.problems.datasets import Dataset, load
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.optimum import minimise
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import simulate


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
            costs = [kbit(line, "gap", gap) for gap in (1e-2, 1e-3, 1e-4)]
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
    rows = [[line.entry.title, *(kbit(line, "gap", gap) for gap in gaps)] for line in lines]
    columns = ["method", "1e-2", "1e-4", "1e-6"]
    report.table("breast cancer, comp-(2, 15), theory's steps: kbit up to a gap", columns, rows)
    report.picture(lines, "gap", problem, "gap", unit="paper_bits_up", title=problem.name)


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


def _unit_rows(data: Dataset) -> Dataset:
    """Rows of unit length: every client is then about equally smooth, and steps are not tiny."""
    return replace(data, x=data.x / data.x.norm(dim=1, keepdim=True).clamp_min(1e-12))


def _double(problem: Problem) -> Problem:
    return replace(problem, rows=problem.rows.to(torch.float64))


EXPERIMENTS: dict[str, Callable[[Report], None]] = {
    "ef-bv": ef_bv,
    "ef-bv-theory": ef_bv_theory,
    **experiments_sparse.EXPERIMENTS,
    "scafflix": scafflix,
}

FAMILIES: dict[str, Experiment] = {
    **experiments_cohort.EXPERIMENTS,
    **experiments_fedsparse.EXPERIMENTS,
    **experiments_fedspa.EXPERIMENTS,
    **experiments_fedp3.EXPERIMENTS,
    **experiments_similarity.EXPERIMENTS,
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
    for name in everything if arguments.experiment == "all" else [arguments.experiment]:
        if name in FAMILIES:
            FAMILIES[name]()
            continue
        report = Report(name, arguments.output, arguments.seeds)
        EXPERIMENTS[name](report)
        report.save()


if __name__ == "__main__":
    console.run(main)
