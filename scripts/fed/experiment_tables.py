"""Tables of the federated experiments: printed as Markdown, returned as rows, run by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Experiment = Callable[[], list[Row]]


def show(title: str, rows: list[Row]) -> list[Row]:
    """Print the rows as a Markdown table and hand them back."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    print(f"\n### {title}\n")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for line in cells:
        print("| " + " | ".join(line) + " |", flush=True)
    return rows


def main(experiments: dict[str, Experiment]) -> None:
    """Run the experiments named on the command line, or all of them."""
    names = sys.argv[1:] or list(experiments)
    for name in names:
        if name not in experiments:
            sys.exit(f"Unknown experiment {name!r}; choose from {', '.join(experiments)}.")
        experiments[name]()


def spread(values: list[float]) -> str:
    """Mean and standard deviation in percent; the mean alone for one seed."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{100 * mean:.1f}"
    deviation = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
