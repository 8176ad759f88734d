"""Cohort Squeeze (thesis chapter 5): do several local rounds per cohort pay, and when?

`python scripts/fed/experiments_cohort.py [cohort-rounds cohort-network cohort-images ...]`
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from experiment_tables import Experiment, Row, main, show
from image_runs import some_rows

from symprune.fed.algorithms import build
from symprune.fed.algorithms.cohort_squeeze.sampling import make_sampling
from symprune.fed.algorithms.cohort_squeeze.theory import exact_prox, minibatch_step, outlook
from symprune.fed.problems.datasets import load
from symprune.fed.problems.losses import Logistic
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.optimum import minimise
from symprune.fed.problems.partitions import partition
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.protocol import Algorithm
from symprune.fed.randomness import Stream
from symprune.fed.simulate import simulate

EPSILON = 5e-3  # goal on ||x - x*||^2
BLOCKS = tuple(i // 10 for i in range(100))
ROUNDS = (1, 2, 3, 5, 7, 10, 15)
NEVER = float("inf")


def clustered(seed: int) -> Problem:
    """Logistic regression, 10 clusters of 10 nearly equal clients: 60 rows of 30 features whose
    scale falls like 6/k, so that L/mu is about 110."""
    g = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=g, dtype=torch.float64)
    scale, shared, parts = 6 / torch.arange(1, 31, dtype=torch.float64), 2 * normal(30), []
    for _ in range(10):
        base = 0.7 * normal(30) + normal(60, 30)
        chance = torch.sigmoid((base * scale) @ (shared + normal(30)) / 3)
        draw = torch.rand(60, generator=g, dtype=torch.float64)
        labels = torch.where(draw < chance, 1.0, -1.0).double()
        parts += [((base + 0.05 * normal(60, 30)) * scale, labels) for _ in range(10)]
    return Problem(Logistic(30), stack_rows(parts), l2=0.1, name=f"clustered {seed}")


def real(name: str, rows: int = 3_000) -> Problem:
    """Logistic regression with mu = 0.1 on data cut into 10 k-means clusters of 10 clients."""
    data = load(name)
    if data.classes != 2:
        even = lambda y: torch.where(y % 2 == 0, 1.0, -1.0).double()  # noqa: E731
        data = replace(data, y=even(data.y), classes=2, test_x=None, test_y=None)
    keep = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:rows]
    data = data.take(keep)
    parts = [(data.x[i], data.y[i]) for i in partition(data, "strata:10", 100)]
    return Problem(Logistic(data.x.shape[1]), stack_rows(parts), l2=0.1, name=name)


def cost_to(problem: Problem, optimum: torch.Tensor, algorithm: Algorithm, turns: int) -> Row:
    """The first record within the goal, or costs of infinity."""
    goal = EPSILON**0.5
    result = simulate(
        algorithm, problem, turns, optimum=optimum, stop=lambda r: r["distance"] <= goal
    )
    found = result.first("distance", goal, falling=True)
    return found or {"cost": NEVER, "global_rounds": NEVER}


def squeezed(gamma: float, K: int, **options: Any) -> Algorithm:
    return build("sppm-as", gamma=gamma, local_rounds=K, blocks=BLOCKS, **options)


def tuned_local_gd(problem: Problem, optimum: torch.Tensor) -> float:
    """Rounds of the best LocalGD with stratified cohorts over steps and numbers of local steps."""
    best = 200.0
    for step in (0.03, 0.1, 0.3, 1.0):
        for local_steps in (1, 5, 20):
            algorithm = squeezed(NEVER, 1, solver="local-sgd", step=step, local_steps=local_steps)
            best = min(best, cost_to(problem, optimum, algorithm, int(best))["cost"])
    return best


def rounds() -> list[Row]:
    """Total cost T K to the goal against K; median of three data sets."""
    problems = [clustered(seed) for seed in (0, 1, 2)]
    optima = [minimise(p) for p in problems]
    local = median(tuned_local_gd(p, x) for p, x in zip(problems, optima, strict=True))
    table: list[Row] = [{"method": "LocalGD, tuned", "K=1": local, "best": local, "saving": 0.0}]
    for label, gamma, options in (
        ("L-BFGS strict, gamma 1", 1.0, {}),
        ("L-BFGS strict, gamma 100", 100.0, {}),
        ("L-BFGS strict, gamma 1000", 1000.0, {}),
        ("L-BFGS iterations, gamma 1000", 1000.0, {"strict": False}),
        ("CG iterations, gamma 1000", 1000.0, {"strict": False, "solver": "cg"}),
        ("CG strict, gamma 1000", 1000.0, {"solver": "cg"}),
    ):
        row: Row = {"method": label}
        for K in ROUNDS:
            costs = [
                cost_to(p, x, squeezed(gamma, K, **options), 150)["cost"]
                for p, x in zip(problems, optima, strict=True)
            ]
            row[f"K={K}"] = median(costs)
        best = min(ROUNDS, key=lambda K: row[f"K={K}"])
        row["best K"], row["best"] = best, row[f"K={best}"]
        row["saving"] = 1 - row["best"] / local
        steps = row["best"] / best
        row["saving, c1=.1 c2=1"] = 1 - (0.1 * best + 1) * steps / (1.1 * local)
        table.append(row)
    return show("Total cost to ||x - x*||^2 < 5e-3 by local rounds per cohort", table)


def steady(problem: Problem, optimum: torch.Tensor, name: str, gamma: float) -> float:
    """Mean squared distance of exact SPPM-AS over the second half of 160 iterations."""
    size = 10 if name == "nice" else None
    sampling = make_sampling(name, 100, size, BLOCKS)
    stream, x, total = Stream.of(0, 0, name), torch.zeros_like(optimum), 0.0
    for t in range(160):
        cohort = sampling.draw(stream)
        x = exact_prox(problem.select(cohort), x, gamma, sampling.weights[cohort])
        total += float((x - optimum).square().sum()) / 80 if t >= 80 else 0.0
    return total


def samplings() -> list[Row]:
    """The floor that each sampling leaves, with exact proximal steps and cohorts of 10."""
    table = []
    for problem in (clustered(0), real("digits")):
        optimum, constants = minimise(problem), problem.constants()
        for gamma in (1.0, 100.0):
            row: Row = {"data": problem.name, "gamma": gamma}
            for name in ("full", "stratified", "nice", "block", "uniform"):
                row[name] = steady(problem, optimum, name, gamma)
            table.append(row)
        step = minibatch_step(constants.L_f, constants.L_max, 100, 10)
        for label, solver, local_steps in (("MB-GD", "gd", 1), ("MB-LocalGD-5", "local-sgd", 5)):
            row = {"data": problem.name, "gamma": label}
            for name in ("stratified", "nice"):
                algorithm = squeezed(
                    NEVER, 1, solver=solver, step=step, local_steps=local_steps, sampling=name
                )
                history = simulate(algorithm, problem, 800, optimum=optimum).history[400:]
                row[name] = sum(r["distance"] ** 2 for r in history) / len(history)
            table.append(row)
    return show("Steady ||x - x*||^2 by sampling, cohort of 10 of 100", table)


def network() -> list[Row]:
    """Hierarchical cost (c1 = .05, c2 = 1) to a test accuracy, MLP on digits, 50 clients."""
    problem = make_problem("digits", model="mlp", split="dirichlet:0.3", clients=50, l2=0.0)
    return hierarchy("digits", problem, (0.7, 0.85))


def images() -> list[Row]:
    """The same on 2000 images of MNIST and of Fashion-MNIST, MLP 784-32-10."""
    rows = []
    for name, goals in (("mnist", (0.7, 0.85)), ("fashion-mnist", (0.6, 0.7))):
        whole = load(name)
        data = some_rows(whole, 2000)
        assert whole.test_x is not None and whole.test_y is not None
        data = replace(data, test_x=whole.test_x[:1000], test_y=whole.test_y[:1000])
        problem = make_problem(data, "mlp:32", "dirichlet:0.3", clients=50, l2=0.0)
        rows += hierarchy(name, problem, goals)
    return rows


def hierarchy(name: str, problem: Problem, goals: tuple[float, float]) -> list[Row]:
    """Hierarchical cost to two test accuracies: LocalGD and SPPM-NICE, both tuned."""
    cheap = {"sampling": "nice", "cohort_size": 10, "local_cost": 0.05, "global_cost": 1.0}

    def costs(turns: int, **options: Any) -> dict[float, float]:
        K = options.get("local_rounds", 1)
        out: dict[float, list[float]] = {goal: [] for goal in goals}
        for seed in (0, 1, 2):
            result = simulate(
                build("sppm-as", **cheap, **options),
                problem,
                turns,
                seed=seed,
                evaluate_every=K,
                stop=lambda r: r["accuracy"] >= goals[1],
            )
            for goal, found in out.items():
                record = result.first("accuracy", goal)
                found.append(NEVER if record is None else record["cost"])
        return {goal: median(found) for goal, found in out.items()}

    def best(trials: list[dict[float, float]]) -> Row:
        return {f"{goal:.0%}": min(t[goal] for t in trials) for goal in goals}

    local = [
        costs(40, solver="local-sgd", gamma=NEVER, local_rounds=1, local_steps=h, step=s)
        for h in (3, 10, 30)
        for s in (0.1, 0.3, 1.0)
    ]
    table: list[Row] = [{"method": "LocalGD, tuned", "K": 1, **best(local)}]
    for gamma in (1.0, 100.0):
        for K in (1, 2, 5, 10, 20):
            trials = [
                costs(
                    min(25 * K, 160),
                    solver="local-adam",
                    gamma=gamma,
                    local_rounds=K,
                    local_steps=3,
                    batch=16,
                    step=s,
                )
                for s in (3e-3, 1e-2)
            ]
            table.append({"method": f"SPPM-NICE, gamma {gamma:g}", "K": K, **best(trials)})
    return show(f"{name}: hierarchical cost to a test accuracy (median of 3 seeds)", table)


def real_data() -> list[Row]:
    """Where the claim holds: outlook, cost of K = 1, of the best K, and of tuned LocalGD."""
    cases = [("digits", 3_000)]
    if os.environ.get("SYMPRUNE_ASSETS"):  # a6a is a part of a9a, of 11 220 rows
        cases += [("mushrooms", 3_000), ("a9a", 3_000), ("a9a", 11_220)]
    table = []
    for name, rows in cases:
        problem = real(name, rows)
        optimum = minimise(problem)
        seen = outlook(problem, make_sampling("stratified", 100, labels=BLOCKS), optimum, EPSILON)
        cost = {
            K: cost_to(problem, optimum, squeezed(1000.0, K), 150)["cost"] for K in (1, 2, 4, 7, 10)
        }
        small = {
            K: cost_to(problem, optimum, squeezed(10.0, K), 150)["cost"] for K in (1, 2, 4, 7, 10)
        }
        K = min(cost, key=lambda k: cost[k])
        k = min(small, key=lambda k: small[k])
        table.append(
            {
                "data": name,
                "rows per client": int(problem.counts.sum()) / problem.clients,
                "L/mu": seen.condition,
                "sigma2/mu2": seen.reach,
                "LocalGD tuned": tuned_local_gd(problem, optimum),
                "gamma 1000, K=1": cost[1],
                "gamma 1000, best (K)": f"{cost[K]:g} ({K})",
                "gamma 10, K=1": small[1],
                "gamma 10, best (K)": f"{small[k]:g} ({k})",
                "outlook": seen.warning or "should pay",
            }
        )
    return show("Strict cost to the goal on real data, 10 strata of 10 clients, mu = 0.1", table)


EXPERIMENTS: dict[str, Experiment] = {
    "cohort-rounds": rounds,
    "cohort-samplings": samplings,
    "cohort-network": network,
    "cohort-images": images,
    "cohort-real-data": real_data,
}

if __name__ == "__main__":
    main(EXPERIMENTS)
