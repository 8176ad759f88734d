"""The page of one pruned model: its numbers, its layers, and a look at one matrix."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from symprune.checkpoint.record import RECORD, read_record
from symprune.errors import SympruneError
from symprune.eval.report import charts, heatmap, page
from symprune.eval.report.charts import Axis, Point, Reference, Series
from symprune.eval.report.page import TableCell, figure_cell, figure_text
from symprune.eval.tables import percent, size
from symprune.validation import is_number

MOST_ROWS = 2000
ERRORS = {
    "relative_error_base": "relative error unrefined",
    "relative_error": "relative error",
    "expected_error_before": "expected error before",
    "expected_error_after": "after",
}
REFINED = (
    ("relative error", "relative_error_base", "relative_error"),
    ("expected error of a row", "expected_error_before", "expected_error_after"),
)

Layer = Mapping[str, Any]


def build(folder: Path, matrix: str | None = None) -> str:
    """The page of the folder `symprune prune` wrote."""
    record = _record(folder)
    layers: list[Layer] = record["layers"]
    merged = merge(layers)
    pair = heatmap.read(folder, layers, matrix)
    sections = [
        page.section("Summary", page.cards(_cards(record)), *_notes(record)),
        page.section("Layers", *_charts(merged)),
    ]
    if pair is not None:
        sections.append(page.section("A matrix and its mask", heatmap.figure(pair)))
    shown = layers if len(layers) <= MOST_ROWS else merged
    sections.append(page.section("All matrices", _table(shown)))
    versions = record.get("versions")
    made = versions if isinstance(versions, dict) else {}
    facts = ", ".join(f"{name} {version}" for name, version in made.items())
    return page.document(
        str(record.get("origin") or record.get("model", folder.name)),
        str(record.get("description") or ""),
        sections,
        f"The run: {facts}." if facts else "",
    )


def _record(folder: Path) -> dict[str, Any]:
    """The folder's record, checked for what the page is made of."""
    record = read_record(folder)
    if record is None:
        raise SympruneError(f"{folder} is neither a run nor a sweep: it has no {RECORD}.")
    layers = record.get("layers")
    if not isinstance(layers, list) or not layers:
        raise SympruneError(f"{folder / RECORD} names no pruned layers.")
    if not all(_is_described(layer) for layer in layers):
        raise SympruneError(f"{folder / RECORD} has a layer that is not fully described.")
    return record


def _is_described(layer: Any) -> bool:
    return (
        isinstance(layer, dict)
        and all(isinstance(layer.get(name), str) for name in ("name", "kind"))
        and all(isinstance(layer.get(name), int) for name in ("rows", "columns", "removed"))
        and layer["rows"] * layer["columns"] > 0
        and is_number(layer.get("sparsity"))
    )


def number_in(values: Mapping[str, Any], name: str) -> float | None:
    """The number of that name, or None when it was not measured."""
    value = values.get(name)
    return value if is_number(value) else None


def _cards(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    items = []
    for entry in record.get("perplexity") or []:
        if not (is_number(entry.get("dense")) and is_number(entry.get("pruned"))):
            continue
        remark = f"dense {figure_text(entry['dense'])}"
        if entry.get("windows") and entry.get("seqlen"):
            remark += f", {entry['windows']} × {entry['seqlen']} tokens"
        items.append(
            (
                f"perplexity, {entry.get('data', 'held-out text')}",
                figure_text(entry["pruned"]),
                remark,
            )
        )
    removed = sum(layer["removed"] for layer in record["layers"])
    weights = sum(layer["rows"] * layer["columns"] for layer in record["layers"])
    remark = f"{removed:,} of {weights:,} weights"
    items.append(("sparsity of the pruned matrices", percent(removed / weights), remark))
    total = number_in(record, "parameters")
    if total:
        items.append(
            ("sparsity of the whole model", percent(removed / total), f"{total:,} parameters")
        )
    mean = _mean(record["layers"], "relative_error")
    if mean is not None:
        items.append(("relative error", figure_text(mean), "mean over the matrices"))
    seconds = record.get("seconds")
    if isinstance(seconds, dict):
        items.append(("time to prune", f"{sum(seconds.values()):.1f} s", ""))
    peak = number_in(record, "peak_memory_bytes")
    if peak:
        items.append(("peak memory", size(peak), ""))
    return items


def _notes(record: Mapping[str, Any]) -> list[str]:
    return [page.paragraph(f"Note: {note}") for note in record.get("notes") or []]


def _mean(layers: Sequence[Layer], name: str) -> float | None:
    values = [number for layer in layers if (number := number_in(layer, name)) is not None]
    return sum(values) / len(values) if values else None


def block_of(name: str) -> int | None:
    """The decoder block a parameter is in: the first number in its name."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


def merge(layers: Sequence[Layer]) -> list[Layer]:
    """One entry per block and kind: the experts of a block add up, their errors average."""
    together: dict[tuple[int | None, str], list[Layer]] = {}
    for layer in layers:
        together.setdefault((block_of(layer["name"]), layer["kind"]), []).append(layer)
    merged: list[Layer] = []
    for members in together.values():
        removed = sum(layer["removed"] for layer in members)
        weights = sum(layer["rows"] * layer["columns"] for layer in members)
        name = members[0]["name"] + (f" and {len(members) - 1} more" if len(members) > 1 else "")
        entry = {**members[0], "name": name, "removed": removed, "sparsity": removed / weights}
        means = {name: _mean(members, name) for name in ERRORS}
        merged.append({**entry, **{k: v for k, v in means.items() if v is not None}})
    return merged


def _charts(layers: Sequence[Layer]) -> list[str]:
    low = min(layer["sparsity"] for layer in layers)
    high = max(layer["sparsity"] for layer in layers)
    note = f"From {percent(low)} to {percent(high)}."
    if percent(low) == percent(high):
        note = f"Every matrix lost the same {percent(low)}, so the lines lie on one another."
    sparsity = Axis("sparsity", charts.PERCENT)
    shown = [_per_block("Sparsity per layer", note, layers, "sparsity", sparsity)]
    if _mean(layers, "relative_error") is not None:
        note = "‖X(W̃ − W)‖ / ‖XW‖, Frobenius norms over the calibration data; lower is better."
        error = Axis("relative error")
        shown.append(_per_block("Relative error per layer", note, layers, "relative_error", error))
    return [*shown, *(chart for what in REFINED if (chart := _refined(layers, *what)))]


def _refined(layers: Sequence[Layer], what: str, before: str, after: str) -> str:
    """A figure after refinement over the same before it; nothing where it changed nothing."""
    ratios = []
    for layer in layers:
        base, refined = number_in(layer, before), number_in(layer, after)
        if base and refined is not None:
            ratios.append({**layer, "ratio": refined / base})
    if all(math.isclose(layer["ratio"], 1.0) for layer in ratios):
        return ""
    title, note = (
        f"What refinement did to the {what}",
        "After refinement ÷ before; below 1 is better.",
    )
    no_change = Reference("1: no change", 1.0)
    return _per_block(title, note, ratios, "ratio", Axis("after ÷ before"), no_change)


def _per_block(
    title: str,
    note: str,
    layers: Sequence[Layer],
    name: str,
    axis: Axis,
    reference: Reference | None = None,
) -> str:
    """A figure of every layer against its block, one line per kind of matrix."""
    kinds: dict[str, list[Point]] = {}
    for layer in layers:
        value = number_in(layer, name)
        if value is not None:
            text = percent(value) if axis.text is charts.PERCENT else figure_text(value)
            block = block_of(layer["name"]) or 0
            kinds.setdefault(layer["kind"], []).append(
                Point(block, value, f"{layer['name']}\n{text}")
            )
    series = [Series(kind, points) for kind, points in kinds.items()]
    return charts.line_chart(title, note, series, Axis("block", whole=True), axis, reference)


def _table(layers: Sequence[Layer]) -> str:
    measured = [name for name in ERRORS if _mean(layers, name) is not None]
    columns = ["block", "matrix", "output × input", "removed", "sparsity"]
    columns += [*(ERRORS[name] for name in measured), "name"]
    rows = []
    for layer in layers:
        shape = f"{layer['rows']:,} × {layer['columns']:,}"
        rows.append(
            [
                figure_cell(block_of(layer["name"]), "d"),
                TableCell(layer["kind"]),
                TableCell(shape, layer["rows"] * layer["columns"]),
                figure_cell(layer["removed"], ",d"),
                TableCell(percent(layer["sparsity"]), layer["sparsity"]),
                *(figure_cell(number_in(layer, name)) for name in measured),
                TableCell(layer["name"]),
            ]
        )
    return page.table(f"The {len(layers)} pruned matrices in the model's order.", columns, rows)
