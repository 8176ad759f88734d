"""EF-BV's comparisons (thesis chapter 2 and appendix A.3): against EF21 with tuned and with the
theorems' steps, k in 1, 2, overlap xi in 1, 2, the nonconvex Fig. A.1, and compressors to choose a
default by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from history_report import Report, kbit
from torch import Tensor

from symprune.fed.algorithms import build
from symprune.fed.compare.runs import Entry, Setting
from symprune.fed.problems.datasets import Dataset, load
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.optimum import minimise
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import simulate

DATA = ("mushrooms", "a9a", "w8a")


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


def ef_bv_overlap(report: Report) -> None:
    """Fig. 2.2: k and xi in 1, 2 with the theorems' steps; bits of EF-BV to where EF21 ends."""
    _races(report, [(k, xi) for k in (1, 2) for xi in (1, 2)], 200, l2=0.1)


def ef_bv_nonconvex(report: Report) -> None:
    """Fig. A.1: the same with the penalty 0.1 sum x^2/(1+x^2) in place of the ridge, k = 1."""
    _races(report, [(1, 1)], 200, l2=0.0, nonconvex=0.1)


def _races(report: Report, cases: list[tuple[int, int]], rounds: int, **penalty: float) -> None:
    rows: list[list[Any]] = []
    for name in DATA:
        data = _unit_rows(_some_rows(load(name), 4000))
        for k, xi in cases:
            problem = make_problem(data, split=f"blocks:{xi}", clients=1000, **penalty)
            rows.append([name, k, xi, *_race(problem, k, rounds)])
            report.say(f"{name}, k = {k}, xi = {xi}")
    columns = ["data", "k", "xi", "gamma EF-BV", "EF21", "loss falls by", "share of EF21's bits"]
    report.table(f"1000 nodes, comp-(k, d/2), to EF21's loss after {rounds} rounds", columns, rows)


def _race(problem: Problem, k: int, rounds: int) -> list[float]:
    """Both steps, what EF21 gains, and the share of its rounds after which EF-BV is there."""
    options: dict[str, Any] = {"compressor": f"comp:{k},{problem.dimension // 2}"}
    options["nonconvex"] = problem.nonconvex > 0
    slow = simulate(build("ef21", **options), problem, rounds, evaluate_every=rounds)
    first, target = slow.series("loss")
    fast = simulate(
        build("ef-bv", **options),
        problem,
        rounds,
        evaluate_every=2,
        stop=lambda record: bool(record["loss"] <= target),
    )
    steps = [run.algorithm.gamma for run in (fast, slow)]  # type: ignore[attr-defined]
    return [*steps, first - target, fast.history[-1]["round"] / rounds]


COMPRESSORS = (
    "identity", "comp:1,0.5", "comp:0.1,0.5", "rand-k:0.1", "top-k:0.1", "natural", "int8", "int4",
)  # fmt: skip


def ef_bv_compressors(report: Report) -> None:
    """What the default compressor was chosen by: encoded kB up to a gap of 1e-4, theory's steps."""
    rows: list[list[Any]] = []
    for name in DATA:
        data = _some_rows(load(name), 2000)
        for nodes, method in ((10, "ef-bv"), (100, "ef-bv"), (100, "ef21"), (100, "diana")):
            problem = make_problem(data, clients=nodes, l2=0.1)
            optimum = minimise(_double(problem)).float()
            costs = [_kilobytes(problem, method, c, optimum) for c in COMPRESSORS]
            rows.append([name, nodes, method, *([cost] for cost in costs)])
            report.say(f"{name}, {nodes} nodes, {method}")
    columns = ["data", "nodes", "method", *COMPRESSORS]
    report.table("kB up per node to a gap of 1e-4 within 600 rounds", columns, rows)


def _kilobytes(problem: Problem, method: str, compressor: str, optimum: Tensor) -> float | None:
    run = simulate(
        build(method, compressor=compressor),
        problem,
        600,
        evaluate_every=5,
        optimum=optimum,
        stop=lambda record: bool(record["gap"] < 1e-4),
    )
    last = run.history[-1]
    return last["bytes_up"] / problem.clients / 1000 if last["gap"] < 1e-4 else None


def _unit_rows(data: Dataset) -> Dataset:
    """Rows of unit length: every client is then about equally smooth, and steps are not tiny."""
    return replace(data, x=data.x / data.x.norm(dim=1, keepdim=True).clamp_min(1e-12))


def _double(problem: Problem) -> Problem:
    return replace(problem, rows=problem.rows.to(torch.float64))


def _some_rows(data: Dataset, count: int) -> Dataset:
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    return data.take(order[:count])


EXPERIMENTS: dict[str, Callable[[Report], None]] = {
    "ef-bv": ef_bv,
    "ef-bv-theory": ef_bv_theory,
    "ef-bv-overlap": ef_bv_overlap,
    "ef-bv-nonconvex": ef_bv_nonconvex,
    "ef-bv-compressors": ef_bv_compressors,
}
