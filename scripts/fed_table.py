"""A table on the terminal from a list of rows, for the federated experiments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

Rows = list[dict[str, Any]]
Experiments = dict[str, Callable[[], Rows]]


def show(title: str, rows: Rows) -> Rows:
    """Print the rows, numbers with four digits, and hand them on."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=120).print(table)
    return rows


def spread(values: list[float]) -> str:
    """Mean and standard deviation over seeds, in percent."""
    mean = sum(values) / len(values)
    deviation = (sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1)) ** 0.5
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}"


def run(experiments: Experiments) -> None:
    """The command line of an experiment file: names of experiments, all by default."""

    def main(names: list[str] = typer.Argument(default=None)) -> None:  # noqa: B008
        for name in names or list(experiments):
            if name not in experiments:
                raise typer.BadParameter(f"{name!r} is none of {', '.join(experiments)}.")
            experiments[name]()

    typer.run(main)
