"""Where a command prints: tables as wide as the terminal, text without what would steer it, and
how much is said."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from symprune.cli.screen.fitted_table import as_list, fit, title_of


def strip_controls(text: str) -> str:
    """Text without what would steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


class Paper(Console):
    """A console on which no name in a table is cut: what has no room becomes a list."""

    def print(self, *objects: Any, **options: Any) -> None:
        if len(objects) != 1 or not isinstance(objects[0], Table):
            super().print(*objects, **options)
            return
        table = objects[0]
        if table.title:
            super().print(title_of(table, self.width), highlight=False, soft_wrap=True)
        fitting = fit(table, self)
        if fitting is not None:
            super().print(fitting, **options)
            return
        for line in as_list(table, self):
            super().print(line, highlight=False, soft_wrap=True)


@dataclass
class Loudness:
    """How much a command says beside its result: `--quiet` nothing, `--verbose` everything."""

    quiet: bool = False
    verbose: bool = False


loudness = Loudness()
