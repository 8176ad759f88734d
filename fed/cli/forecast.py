"""What a federated run or a comparison of some takes: its first turns, timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from symprune.errors import Diverged
from symprune.jobs.estimate.forecast import Forecast, where_and_why
from symprune.machine import memory
from symprune.machine.capacity import Capacity

if TYPE_CHECKING:
    from symprune.fed.compare.plan import Plan
    from symprune.fed.compare.runs import Entry, Setting
    from symprune.fed.problems.problem import Problem
    from symprune.fed.protocol import Algorithm
    from symprune.fed.simulate import Pace

FIGURES = 200  # bytes of a figure in a history, generously


def forecast_run(
    algorithm: Algorithm,
    problem: Problem,
    rounds: int,
    pace: Pace,
    held: int,
    spent: float,
    output: Path | None,
) -> Forecast:
    """Of a run whose first turns are done; held: bytes the process held before them; spent: seconds
    that have passed."""
    seconds = {"rounds": pace.turn * pace.turns}
    if pace.evaluations:
        seconds["evaluations"] = pace.evaluation * pace.evaluations
    what = f"{algorithm.name} on {problem.name}, {rounds} rounds"
    size = 0
    if output is not None:
        size = problem.dimension * problem.dtype.itemsize + 10 * FIGURES * pace.evaluations
    return Forecast(
        what, where_and_why(problem.device, str(problem.device)),
        Capacity.of(output or Path(), problem.device), seconds, spent, memory.peak(), held, size,
        "run the clients in smaller stacks (--clients-at-once)",
    )  # fmt: skip


def forecast_comparison(
    plan: Plan,
    problem: Problem,
    setting: Setting,
    output: Path,
    tell: Callable[[str], None],
    clock: Callable[[], float],
    begun: float,
) -> Forecast:
    """Of all runs of a comparison: of each method some turns are done, with the first of the
    settings it is tuned on, or the next where that one diverges."""
    held, seconds = memory.now(), dict[str, float]()
    for entry in plan.entries:
        tell(f"Timing {entry.title}")
        pace = _time(entry, problem, setting)
        tried = len(list(entry.candidates())) if entry.tune else 0
        runs = tried * (setting.tuning_rounds or setting.rounds)
        runs += len(setting.seeds) * setting.rounds
        each = pace.turn + pace.evaluation / setting.evaluate_every
        seconds[entry.title] = seconds.get(entry.title, 0.0) + runs * each
    count = len(plan.entries)
    methods = "1 method" if count == 1 else f"{count} methods"
    seeds = "1 seed" if len(setting.seeds) == 1 else f"{len(setting.seeds)} seeds"
    what = f"{methods} on {problem.name}, {setting.rounds} rounds with {seeds}"
    histories = count * len(setting.seeds) * setting.rounds // setting.evaluate_every
    return Forecast(
        what, where_and_why(problem.device, str(problem.device)),
        Capacity.of(output, problem.device), seconds, clock() - begun, memory.peak(), held,
        10 * FIGURES * histories, "compare fewer clients",
    )  # fmt: skip


def _time(entry: Entry, problem: Problem, setting: Setting) -> Pace:
    """The pace of the first setting that does not diverge at once."""
    from symprune.fed.algorithms import build
    from symprune.fed.simulate import Pace, simulate

    found: list[Pace] = []

    def ask_only(pace: Pace) -> bool:
        found.append(pace)
        return False

    for options in entry.candidates():
        try:
            simulate(
                build(entry.algorithm, **options), problem, setting.rounds,
                evaluate_every=setting.evaluate_every,
                gradient_norm=True if setting.metric == "gradient_norm" else None,
                optimum=setting.optimum, clients_at_once=setting.clients_at_once,
                foresee=ask_only,
            )  # fmt: skip
        except Diverged:
            continue
        return found[0]
    return Pace(0.0, 0.0, 0, 0)  # said when it is run
