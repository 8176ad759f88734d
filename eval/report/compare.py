"""The page of a comparison: what the models write, their figures, and the error of every block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from symprune.eval import comparison
from symprune.eval.comparison import ERRORS, Row
from symprune.eval.report import charts, page, samples
from symprune.eval.report.charts import Axis, Point, Series
from symprune.eval.report.page import TableCell, figure_text
from symprune.validation import parse_json


def is_one(path: Path) -> bool:
    """Whether a file is what `symprune compare --json` wrote."""
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("kind") == comparison.KIND


def read(path: Path) -> str:
    """The page of such a file."""
    return build(parse_json(path.read_text(encoding="utf-8")))


def build(record: Mapping[str, Any]) -> str:
    """The page of a comparison's record."""
    comparison.check(record)
    rows: list[Row] = record["models"]
    labels = [str(row["label"]) for row in rows]
    notes = [page.paragraph(f"Note: {note}") for note in record["notes"]]
    table = _table("What is known of each.", labels, comparison.figures(rows))
    sections = [page.section("Side by side", table, *notes), *samples.sections(record)]
    pairs = comparison.overlaps(record)
    if pairs:
        cells = [[TableCell(text) for text in pair] for pair in pairs]
        caption = "Weights that both keep, as a share of those that either keeps."
        overlap = page.table(caption, ["one", "other", "in common"], cells)
        sections.append(page.section("Do they keep the same weights?", overlap))
    drawn = [chart for name in ERRORS if (chart := _errors(rows, name))]
    if drawn:
        title, kinds = comparison.error_kinds(rows)
        drawn.append(_table(f"Mean {title}, by kind of matrix.", labels, kinds))
        sections.append(page.section("Where it goes wrong", *drawn))
    versions = record.get("versions")
    made = versions if isinstance(versions, dict) else {}
    facts = ", ".join(f"{name} {version}" for name, version in made.items())
    given = ", ".join(str(row["given"]) for row in rows)
    title = " and ".join(labels) if len(labels) < 4 else f"{len(labels)} models"
    first = page.verdict(comparison.verdict(record))
    return page.document(title, f"Compared: {given}", sections, f"Measured with {facts}.", first)


def _table(caption: str, labels: Sequence[str], found: Mapping[str, list[str]]) -> str:
    cells = [[TableCell(name), *(TableCell(text or "–") for text in found[name])] for name in found]
    return page.table(caption, ["figure", *labels], cells)


def _errors(rows: Sequence[Row], name: str) -> str:
    """The mean error of every block, a line for each model that recorded it."""
    series = []
    for row in rows:
        blocks = comparison.errors_by_block(row, name)
        points = [
            Point(block, error, f"{row['label']}, block {block}\n{figure_text(error)}")
            for block, error in blocks.items()
        ]
        if points:
            series.append(Series(str(row["label"]), points))
    if not series:
        return ""
    title = ERRORS[name][:1].upper() + ERRORS[name][1:]
    note = "Mean over the block's matrices; lower is better."
    return charts.line_chart(title, note, series, Axis("block", whole=True), Axis("relative error"))
