"""Several algorithms on one problem: tuned alike, run over several seeds, summed up in one table.

Step sizes and other options are chosen on a grid by the training loss of the model that would be
evaluated (pruned, or personal), with a seed of their own: neither test rows nor the seeds that are
reported take part in the choice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from symprune.errors import Diverged, SympruneError
from symprune.fed.algorithms import build
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Algorithm
from symprune.fed.simulate import Record, simulate

FALLING = ("loss", "gap", "distance", "gradient_norm", "personal_loss")
TUNING_SEED = 10_007
TAIL = 5  # evaluations averaged for a final value


@dataclass(frozen=True)
class Entry:
    """One line of a comparison: an algorithm, its options, and a grid to choose some from."""

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    tune: dict[str, list[Any]] = field(default_factory=dict)
    label: str = ""

    @property
    def title(self) -> str:
        return self.label or self.algorithm

    def candidates(self) -> Iterator[dict[str, Any]]:
        for values in itertools.product(*self.tune.values()):
            yield {**self.options, **dict(zip(self.tune, values, strict=True))}


@dataclass
class Line:
    """What came out for one entry: the chosen options and the history of every seed."""

    entry: Entry
    algorithm: Algorithm
    histories: list[list[Record]]

    def final(self, metric: str) -> list[float]:
        """The mean of the last evaluations, per seed."""
        return [tail_mean(history, metric) for history in self.histories]

    def cost(self, metric: str, target: float, unit: str) -> float | None:
        """Mean over seeds of `unit` at the first crossing; None when a seed never crosses."""
        costs = [first_crossing(history, metric, target) for history in self.histories]
        if any(record is None for record in costs):
            return None
        return sum(record[unit] for record in costs if record is not None) / len(costs)

    def per_round(self, unit: str) -> float:
        """Mean over seeds of `unit` in a round."""
        last = [history[-1] for history in self.histories]
        return sum(record[unit] / max(record["round"], 1) for record in last) / len(last)


@dataclass(frozen=True)
class Setting:
    """How every entry is run: rounds, seeds, what is measured and how often."""

    rounds: int
    seeds: tuple[int, ...] = (0, 1, 2)
    metric: str = "accuracy"
    evaluate_every: int = 1
    optimum: Tensor | None = None
    x0: Tensor | None = None
    tuning_rounds: int | None = None
    clients_at_once: int | None = None


def run_entry(
    problem: Problem,
    entry: Entry,
    setting: Setting,
    say: Callable[[str], None] = lambda text: None,
    watch: Callable[[Record, str], None] = lambda *_: None,
) -> Line:
    """Choose the options if there is a grid, then run every seed. watch is given every evaluation
    of a seed, and the name of that run."""
    options = tune_options(problem, entry, setting, say) if entry.tune else entry.options
    histories = []
    for seed in setting.seeds:
        say(f"{entry.title}: seed {seed}")
        chosen, name = build(entry.algorithm, **options), f"{entry.title}, seed {seed}"

        def seen(record: Record, name: str = name) -> None:
            watch(record, name)

        histories.append(_run(problem, chosen, setting, seed, setting.rounds, seen))
        watch(histories[-1][0], name)
    return Line(replace(entry, options=options), build(entry.algorithm, **options), histories)


def tune_options(
    problem: Problem, entry: Entry, setting: Setting, say: Callable[[str], None]
) -> dict[str, Any]:
    """The grid point with the lowest final training loss; those that diverge are out."""
    best, chosen = math.inf, None
    rounds = setting.tuning_rounds or setting.rounds
    candidates = list(entry.candidates())
    for number, options in enumerate(candidates, 1):
        say(f"{entry.title}: setting {number} of {len(candidates)}")
        algorithm = build(entry.algorithm, **options)
        loss = _training_loss(problem, algorithm, setting, rounds)
        if loss < best:
            best, chosen = loss, options
    if chosen is None:
        raise SympruneError(f"{entry.title} diverges with every setting of its grid.")
    return chosen


def _training_loss(problem: Problem, algorithm: Algorithm, setting: Setting, rounds: int) -> float:
    try:
        history = _run(problem, algorithm, setting, TUNING_SEED, rounds)
    except Diverged:
        return math.inf
    return tail_mean(history, tuning_metric(setting.metric))


def tuning_metric(metric: str) -> str:
    """What stands for this metric on the training rows."""
    if metric in FALLING:
        return metric
    return "personal_loss" if metric.startswith("personal") else "loss"


def _run(
    problem: Problem,
    algorithm: Algorithm,
    setting: Setting,
    seed: int,
    rounds: int,
    progress: Callable[[Record], None] = lambda _: None,
) -> list[Record]:
    return simulate(
        algorithm,
        problem,
        rounds,
        seed=seed,
        x0=setting.x0,
        evaluate_every=setting.evaluate_every,
        gradient_norm=True if setting.metric == "gradient_norm" else None,
        optimum=setting.optimum,
        clients_at_once=setting.clients_at_once,
        progress=progress,
    ).history


def tail_mean(history: list[Record], metric: str) -> float:
    if metric not in history[-1]:
        known = ", ".join(history[-1])
        raise SympruneError(f"The run has no metric {metric!r}; it has {known}.")
    tail = [record[metric] for record in history[-TAIL:]]
    return sum(tail) / len(tail)


def first_crossing(history: list[Record], metric: str, target: float) -> Record | None:
    for record in history:
        value = record[metric]
        if value <= target if metric in FALLING else value >= target:
            return record
    return None


def summary(
    lines: list[Line], metric: str, targets: list[float], clients: int
) -> list[dict[str, Any]]:
    """One flat record per line, for the table, the JSON and the documentation."""
    rows = []
    for line in lines:
        final = line.final(metric)
        mean = sum(final) / len(final)
        spread = (sum((v - mean) ** 2 for v in final) / max(1, len(final) - 1)) ** 0.5
        row: dict[str, Any] = {"method": line.entry.title, metric: mean, "std": spread}
        row["options"] = line.entry.options
        for way in ("up", "down"):
            row[f"kB {way} a round"] = line.per_round(f"bytes_{way}") / clients / 1000
        for target in targets:
            size = line.cost(metric, target, "bytes_up")
            bits = line.cost(metric, target, "paper_bits_up")
            row[f"kB up to {target:g}"] = None if size is None else size / clients / 1000
            row[f"paper kbit up to {target:g}"] = None if bits is None else bits / 1000
            row[f"rounds to {target:g}"] = line.cost(metric, target, "round")
        rows.append(row)
    return rows
