"""The page around the pictures: head, style, script, cards and tables that sort."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from symprune import __version__

OPTION = re.compile(r"(?<!\S)--?[a-z][\w-]*")


@dataclass(frozen=True)
class TableCell:
    """One cell of a table: what is shown, and the number it sorts by when it is one."""

    text: str
    value: float | None = None
    strong: bool = False
    hint: str = ""


def document(
    title: str, subtitle: str, sections: Sequence[str], facts: str = "", first: str = ""
) -> str:
    """The whole page, `first` above everything else. The policy in its head forbids every request
    and every other script."""
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src "
    policy += f"'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)} · symprune</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{escape(title)}</h1>\n<p>{escape(subtitle)}</p>\n{first}</header>\n<main>\n"
        + "\n".join(sections)
        + f"\n</main>\n<footer><p>Made by symprune {escape(__version__)}. {escape(facts)}</p>"
        f"</footer>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def section(title: str, *parts: str) -> str:
    """A part of the page with a heading."""
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def beside(*figures: str) -> str:
    """Pictures next to each other, on a phone below each other."""
    return f'<div class="beside">{"".join(figures)}</div>'


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def verdict(text: str) -> str:
    """What all of it comes to, in a sentence, above everything else."""
    return f'<p class="verdict">{escape(text)}</p>' if text else ""


def command(text: str) -> str:
    """A line for a terminal, with a button that copies it; no option is broken at its hyphens."""
    shown = OPTION.sub(r'<span class="option">\g<0></span>', escape(text))
    return (
        '<div class="command"><pre tabindex="0" role="region" aria-label="Command">'
        f"<code>{shown}</code></pre>"
        '<button type="button" class="copy" hidden>Copy</button></div>'
    )


def filtered(label: str, *parts: str) -> str:
    """Parts of the page under a field that leaves what has all the words in it: rows and marks."""
    return (
        f'<div class="filtered">\n<p class="filter"><label>{escape(label)} '
        '<input type="search" autocomplete="off" spellcheck="false" '
        'placeholder="words; -word leaves out"></label> <output></output></p>\n'
        + "\n".join(parts)
        + "\n</div>"
    )


def details(title: str, body: str) -> str:
    """What is shown when it is asked for."""
    return f"<details>\n<summary>{escape(title)}</summary>\n{body}\n</details>"


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """Headline numbers: (what it is, the number, a remark)."""
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(number)}"
        + (f"<small>{escape(remark)}</small>" if remark else "")
        + "</dd></div>"
        for name, number, remark in items
    )
    return f'<dl class="cards">{shown}</dl>'


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[TableCell]]) -> str:
    """A table that sorts by a click on a column's head; columns of numbers stand to the right.

    A column is of numbers when every filled cell of it has a value; a cell without one sorts last.
    A column that no row has anything in is left out.
    """
    filled = [
        any(row[i].text not in ("", "–") for row in rows) or not rows for i in range(len(columns))
    ]
    columns = [name for name, has in zip(columns, filled, strict=True) if has]
    rows = [[cell for cell, has in zip(row, filled, strict=True) if has] for row in rows]
    numeric = [
        any(row[i].value is not None for row in rows)
        and all(row[i].value is not None or row[i].text in ("", "–") for row in rows)
        for i in range(len(columns))
    ]
    head = "".join(
        f'<th scope="col"{_number(is_number)}><button type="button">{escape(name)}</button></th>'
        for name, is_number in zip(columns, numeric, strict=True)
    )
    body = "\n".join(
        "<tr>" + "".join(_td(cell, n) for cell, n in zip(row, numeric, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0">\n'
        f'<table class="sortable">\n<caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _number(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _td(cell: TableCell, is_number: bool) -> str:
    value = ""
    if cell.value is not None and not math.isnan(cell.value):
        value = f' data-value="{cell.value!r}"'.replace("inf", "Infinity")
    hint = f' data-tip="{escape(cell.hint)}"' if cell.hint else ""
    text = f"<strong>{escape(cell.text)}</strong>" if cell.strong else escape(cell.text)
    return f"<td{_number(is_number)}{value}{hint}>{text}</td>"


def figure_text(number: float) -> str:
    """A perplexity or an error as a person writes it: 4 or so digits that matter."""
    if math.isnan(number):
        return "not a number"
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    size = abs(number)
    if size >= 1e6 or 0 < size < 1e-4:
        return f"{number:.2e}"
    if size >= 1000:
        return f"{number:,.0f}"
    if size >= 10:
        return f"{number:.2f}"
    return f"{number:.3f}" if size >= 0.1 or size == 0 else f"{number:.3g}"


def figure_cell(number: float | None, digits: str = "") -> TableCell:
    """A cell for a number that may not have been measured."""
    if number is None:
        return TableCell("–")
    return TableCell(format(number, digits) if digits else figure_text(number), number)
