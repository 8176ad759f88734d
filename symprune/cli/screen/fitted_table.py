"""A table in the width there is: with every word whole, or as a list.

rich takes width from all columns alike and breaks words where that is not enough. Names and figures
are words here, so each column keeps its longest one; where these do not fit side by side, or text
would become a tower of short lines, rows become entries of a list.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

LIST_BELOW = 60  # columns of the terminal: from there on a list is easier to read
TALLEST = 6  # lines of a cell


def fit(table: Table, console: Console) -> Table | None:
    """The table, without its title, in the console's width; None where it is better a list."""
    if console.width < LIST_BELOW:
        return None
    needs = [_measure(column, table, console) for column in table.columns]
    room = console.width - 3 * len(needs) - 1  # a line and a space on both sides of each
    if sum(least for least, _ in needs) > room:
        return None
    widths = share_width(needs, room)
    fitting = copy(table)
    fitting.title = None
    fitting.columns = [
        replace(column, width=width) for column, width in zip(table.columns, widths, strict=True)
    ]
    cells = [(_plain(cell), width) for width, c in zip(widths, table.columns, strict=True)
             for cell in c.cells]  # fmt: skip
    if any(_count_lines(text, width) > TALLEST for text, width in cells):
        return None
    return fitting


def share_width(needs: list[tuple[int, int]], room: int) -> list[int]:
    """The width of each column, from the least it can have and the most it has use for: what is
    left goes to those that lack the largest share of it."""
    widths = [least for least, _ in needs]
    for _ in range(room - sum(widths)):
        wanting = [n for n, (_, most) in enumerate(needs) if widths[n] < most]
        if not wanting:
            break
        widths[min(wanting, key=lambda n: widths[n] / needs[n][1])] += 1
    return widths


def as_list(table: Table, console: Console) -> Iterator[Text]:
    """Each row's first cell, and the others below it, named by their columns."""
    columns = [[_plain(cell, ", ") for cell in column.cells] for column in table.columns]
    names = [_plain(column.header, ", ") for column in table.columns]
    rows = list(zip(*columns, strict=True))
    if table.show_footer:
        rows.append(tuple(_plain(column.footer, ", ") for column in table.columns))
    for first, *others in rows:
        if len(others) == 1 and len(first) + len(others[0]) + 2 <= console.width:
            yield Text.assemble((f"{first}: ", "bold"), others[0])
            continue
        yield Text(wrap(first, console.width), style="bold")
        for name, value in zip(names[1:], others, strict=True):
            if value:
                yield _entry(name, value, console.width)


def title_of(table: Table, width: int) -> Text:
    return Text(wrap(_plain(table.title), width), style="italic")


def wrap(text: str, width: int, indent: str = "") -> str:
    """Lines of whole words, longer than the width only where a word is."""
    settings: Any = {"initial_indent": indent, "subsequent_indent": indent}
    settings |= {"break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.wrap(text, width, **settings))


def _entry(name: str, value: str, width: int) -> Text:
    label = f"  {name}: " if name else "  "
    if len(label) + len(value) <= width:
        return Text.assemble((label, "dim"), value)
    head = [(wrap(label.strip(), width, "  ") + "\n", "dim")] if name else []
    return Text.assemble(*head, wrap(value, width, "    "))


def _measure(column: Column, table: Table, console: Console) -> tuple[int, int]:
    """The longest word of a column and its longest line."""
    shown = [column.header, *column.cells, *([column.footer] if table.show_footer else [])]
    found = [Measurement.get(console, console.options, _text(each)) for each in shown]
    most = max(each.maximum for each in found)
    return (most if column.no_wrap else max(each.minimum for each in found)), most


def _count_lines(text: str, width: int) -> int:
    lines = text.split("\n")
    return sum(max(1, len(textwrap.wrap(line, max(width, 1)))) for line in lines)


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _plain(cell: Any, between_lines: str = "\n") -> str:
    return _text(cell).plain.strip().replace("\n", between_lines)
