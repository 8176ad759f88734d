"""A Markdown table from a list of rows, for the federated experiments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Rows = list[dict[str, Any]]
Experiments = dict[str, Callable[[], Rows]]


def show(title: str, rows: Rows) -> Rows:
    """Print the rows, numbers with four digits, and hand them on."""
    columns = list(rows[0])
    lines = [f"**{title}**", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        cells = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    print("\n".join(lines) + "\n", flush=True)
    return rows


def spread(values: list[float]) -> str:
    """Mean and standard deviation over seeds, in percent."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{100 * mean:.1f}"
    deviation = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}"


def run(experiments: Experiments) -> None:
    """The command line of an experiment file: names of experiments, all by default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="EXPERIMENT", help=", ".join(experiments))
    for name in parser.parse_args().names or list(experiments):
        if name not in experiments:
            parser.error(f"{name!r} is none of {', '.join(experiments)}.")
        experiments[name]()
