"""The page of a bench: a picture of bars for every figure, and all of them in a table."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symprune.errors import SympruneError
from symprune.eval.report import bars, page, pareto
from symprune.eval.report.bars import Bar
from symprune.eval.report.page import TableCell, figure_cell, figure_text
from symprune.eval.report.pareto import Choice
from symprune.eval.tables import bench_kind, bench_title, size
from symprune.validation import has_kinds, is_number, parse_json

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """What is drawn: its name in a row, a title, a remark, and how a number of it is written."""

    name: str
    title: str
    note: str
    text: Callable[[float], str]

    def of(self, row: Row) -> float | None:
        value = row.get(self.name)
        if isinstance(value, Mapping):  # the perplexity, with what it was measured on
            value = value.get(self.name)
        return value if is_number(value) and math.isfinite(value) else None


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"


HIGHER, LOWER = "Higher is better.", "Lower is better."
FIGURES = (
    Figure("decode_tokens_per_second", "Decoding, tokens a second", HIGHER, "{:,.1f}".format),
    Figure("prefill_tokens_per_second", "Prompt, tokens a second", HIGHER, "{:,.1f}".format),
    Figure("first_token_seconds", "Time to the first token", LOWER, _milliseconds),
    Figure("memory_bytes", "Memory", f"What the model adds to its process. {LOWER}", size),
    Figure("file_bytes", "Size on disk", f"Weights, configuration and tokenizer. {LOWER}", size),
    Figure(
        "bits_per_weight",
        "Bits a weight",
        f"Of the blocks' matrices, masks and scales included. {LOWER}",
        "{:.2f}".format,
    ),
    Figure("perplexity", "Perplexity", LOWER, figure_text),
)
PLAN = dict.fromkeys(("prompt_tokens", "new_tokens", "threads", "rounds"), int)
NEEDED = dict.fromkeys(("label", "engine", "dtype"), str)
MEASURED = {"data": str, "windows": int, "seqlen": int}


def read(path: Path) -> str:
    """The page of the file `symprune bench --json` wrote."""
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SympruneError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise SympruneError(f"{path} is not the JSON file of a bench.") from error
    rows = record.get("models") if isinstance(record, dict) else None
    if not isinstance(rows, list) or not rows or record.get("kind") != "bench":
        raise SympruneError(f"{path} is not the JSON file of a bench.")
    if not all(map(_is_described, rows)):
        raise SympruneError(f"{path} has a model that is not fully described.")
    around = {"machine": {}, "versions": {}, "notes": [], **record}
    if not has_kinds(around, {"machine": dict, "versions": dict, "notes": list}):
        raise SympruneError(f"{path} is not the JSON file of a bench.")
    if not has_kinds(record.get("plan"), PLAN):
        raise SympruneError(f"{path} does not say what was measured.")
    return build(record)


def _is_described(row: Any) -> bool:
    if not has_kinds(row, NEEDED):
        return False
    packed, measured = row.get("packed") or [], row.get("perplexity")
    texts = isinstance(packed, list) and all(isinstance(kind, str) for kind in packed)
    return texts and (not measured or has_kinds(measured, MEASURED))


def build(record: Mapping[str, Any]) -> str:
    """The page of a bench's record."""
    rows: list[Row] = record["models"]
    names = [f"{row['label']} ({bench_kind(row)})" for row in rows]
    drawn = [chart for figure in FIGURES if (chart := _chart(figure, rows, names))]
    notes = [page.paragraph(str(note)) for note in record.get("notes", [])]
    machine = record.get("machine", {})
    where = f"On {machine.get('processor', 'this machine')}, {machine.get('cores', '?')} cores. "
    where += "Every model in a process of its own, in turns; figures are medians over the rounds."
    sections = [
        page.section("The command to repeat it", page.command(_command(record))),
        page.section("Side by side", page.cards(_cards(rows, names)), *notes),
        *(
            [page.section("What each is worth", *worth)]
            if (worth := _frontiers(rows, names))
            else []
        ),
        page.section("One by one", *drawn),
        page.section("All figures", page.paragraph(where), _table(rows, names)),
    ]
    versions = ", ".join(f"{name} {v}" for name, v in record.get("versions", {}).items())
    title = " and ".join(dict.fromkeys(str(row["label"]) for row in rows))
    return page.document(
        title,
        bench_title(record["plan"]),
        sections,
        f"The run: {versions}.",
        page.verdict(verdict(record)),
    )


def verdict(record: Mapping[str, Any]) -> str:
    """The quickest against the first: how much faster, larger and worse it is."""
    rows: list[Row] = record["models"]
    speed, file, perplexity = FIGURES[0], FIGURES[4], FIGURES[6]
    best = max(rows, key=lambda row: speed.of(row) or 0.0)
    label, first = best["label"], rows[0]
    if best is first:
        found = speed.of(best)
        rate = "" if found is None else f" at {speed.text(found)} tokens a second"
        return f"{label} is the quickest to decode{rate}." if len(rows) > 1 else ""
    fast, slow = speed.of(best), speed.of(first)
    times = f"{fast / slow:.2g}" if fast and slow else ""
    how = {"": "faster than", "1": "about as fast as"}.get(times, f"{times} times as fast as")
    said = f"{label} decodes {how} {first['label']}"
    after, before = file.of(best), file.of(first)
    if after and before:
        share = f"{100 * after / before:.0f}"
        said += ", as large" if share == "100" else f", in {share} % of its size"
    after, before = perplexity.of(best), perplexity.of(first)
    if after and before:
        said += f", with perplexity {figure_text(after)} against {figure_text(before)}"
    return f"{said}."


def _command(record: Mapping[str, Any]) -> str:
    words = [
        "symprune",
        "bench",
        *(str(row.get("given") or row["label"]) for row in record["models"]),
    ]
    plan = record["plan"]
    for name in (*PLAN, "device", "data", "windows", "seqlen"):
        if plan.get(name) not in (None, "auto"):
            words += [f"--{name.replace('_', '-')}", str(plan[name])]
    return shlex.join(words)


def _frontiers(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Perplexity against speed and bits, where three or more models make that a picture."""
    perplexity, figures = FIGURES[6], []
    for figure, falls in ((FIGURES[0], True), (FIGURES[5], False)):
        choices = [
            Choice(name, cost, value)
            for row, name in zip(rows, names, strict=True)
            if (cost := figure.of(row)) and (value := perplexity.of(row)) is not None
        ]
        if len(choices) > 2:
            title = f"Perplexity against {figure.title[0].lower()}{figure.title[1:]}"
            axis = figure.title.lower()
            figures.append(
                pareto.figure(title, figure.note, choices, axis, figure.text, falls=falls)
            )
    return [figure for figure in figures if figure]


def _cards(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[str, str, str]]:
    """The quickest against the first, and the smallest."""
    speed, file = FIGURES[0], FIGURES[4]
    found = [(speed.of(row) or 0.0, name) for row, name in zip(rows, names, strict=True)]
    best, name = max(found)
    items = [("quickest to decode", f"{speed.text(best)} tokens/s", name)]
    if len(rows) > 1 and found[0][0] and name != names[0]:
        items.append(("against the first", f"{best / found[0][0]:.2f} ×", names[0]))
    sizes = [(file.of(row) or math.inf, name) for row, name in zip(rows, names, strict=True)]
    if math.isfinite(min(sizes)[0]):
        items.append(("smallest on disk", size(min(sizes)[0]), min(sizes)[1]))
    return items


def _chart(figure: Figure, rows: Sequence[Row], names: Sequence[str]) -> str:
    """Nothing where no model has the figure."""
    shown = [
        Bar(name, value, figure.text(value), f"{name}\n{figure.title}: {figure.text(value)}", index)
        for index, (row, name) in enumerate(zip(rows, names, strict=True))
        if (value := figure.of(row)) is not None
    ]
    note = figure.note
    measured = next((row["perplexity"] for row in rows if row.get("perplexity")), None)
    if figure.name == "perplexity" and measured:
        note += f" {measured['data']}, {measured['windows']} × {measured['seqlen']} tokens."
    return bars.bar_chart(figure.title, note, shown) if shown else ""


def _table(rows: Sequence[Row], names: Sequence[str]) -> str:
    columns = ["model", *(figure.title for figure in FIGURES), "whole process"]
    cells = []
    for row, name in zip(rows, names, strict=True):
        line = [TableCell(name)]
        for figure in FIGURES:
            value = figure.of(row)
            text = "–" if value is None else figure.text(value)
            line.append(TableCell(text, value))
        held = row.get("process_bytes")
        line.append(TableCell(size(held), held) if is_number(held) else figure_cell(None))
        cells.append(line)
    return page.table("A click on a column's head sorts by it.", columns, cells)
