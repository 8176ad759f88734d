"""The YAML file of a comparison, read and checked: every mistake is named before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from symprune.errors import SympruneError
from symprune.fed.algorithms import choose
from symprune.fed.compare.runs import Entry
from symprune.fed.problems.make import make_problem
from symprune.fed.protocol import check
from symprune.validation import check_small_file, parse_yaml, read_numbers

DEFAULTS = {"rounds": 100, "seeds": [0], "metric": "accuracy", "evaluate_every": 1, "targets": []}
ENTRY = ("algorithm", "label", "tune")


@dataclass(frozen=True)
class Plan:
    """What is compared (`problem` as for `make_problem`) and how it is run."""

    problem: dict[str, Any]
    entries: list[Entry]
    rounds: int
    seeds: tuple[int, ...]
    metric: str
    evaluate_every: int
    targets: list[float]


def read_plan(file: Path) -> Plan:
    try:
        check_small_file(file, "The plan")
        content = read_numbers(parse_yaml(file.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SympruneError(f"{file} cannot be read: {str(error).splitlines()[0]}.") from None
    given = isinstance(content, dict) and isinstance(content.get("algorithms"), list)
    check(given and bool(content["algorithms"]), f"{file} has no list of algorithms.")
    for key in content:
        check(key in (*DEFAULTS, "problem", "algorithms"), f"{file} has an unknown entry {key!r}.")
    plan = {**DEFAULTS, "problem": {}, **content}
    for key in ("rounds", "evaluate_every"):
        whole = isinstance(plan[key], int) and plan[key] >= 1
        check(whole, f"{file}: {key} = {plan[key]!r} is no positive whole number.")
    for key, kind in (("seeds", int), ("targets", (int, float))):
        fits = isinstance(plan[key], list) and all(isinstance(v, kind) for v in plan[key])
        check(fits, f"{file}: {key} = {plan[key]!r} is no list of numbers.")
    check(bool(plan["seeds"]), f"{file} has no seeds.")
    check(isinstance(plan["problem"], dict), f"{file}: the problem is no list of settings.")
    for key in plan["problem"]:
        known = key in make_problem.__annotations__ and key != "return"
        check(known, f"{file}: a problem has no setting {key!r}.")
    entries = [_entry(file, item) for item in plan.pop("algorithms")]
    return Plan(entries=entries, **{**plan, "seeds": tuple(plan["seeds"])})


def _entry(file: Path, item: Any) -> Entry:
    """One algorithm of the list: its name, or its name with options and a grid."""
    item = {"algorithm": item} if isinstance(item, str) else item
    named = isinstance(item, dict) and isinstance(item.get("algorithm"), str)
    check(named, f"{file} has an entry without an algorithm: {item!r}.")
    grid = item.get("tune", {})
    fits = isinstance(grid, dict) and all(isinstance(v, list) and v for v in grid.values())
    check(fits, f"{file}: tune = {grid!r} must give a list of values for every option.")
    options = {k: v for k, v in item.items() if k not in ENTRY}
    entry = Entry(item["algorithm"], options, grid, str(item.get("label", "")))
    for candidate in entry.candidates():
        choose(entry.algorithm, **candidate)
    return entry
