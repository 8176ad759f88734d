"""The report of an experiment with seeds: tables as Markdown, histories and pictures on disk."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from symprune.fed.compare.plots import plot
from symprune.fed.compare.runs import Entry, Line, Setting, first_crossing, run_entry
from symprune.fed.problems.problem import Problem


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


def kbit(line: Line, metric: str, target: float) -> list[float | None]:
    """The paper's kbit (32 a value) per client at the first crossing, per seed."""
    records = [first_crossing(history, metric, target) for history in line.histories]
    return [None if record is None else record["paper_bits_up"] / 1000 for record in records]


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
