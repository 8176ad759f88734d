"""The layers of a run: pictures of what differs between them, with one legend, and a table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from symprune.eval.report import charts, page
from symprune.eval.report.charts import Axis, Point, Reference, Series
from symprune.eval.report.page import TableCell, figure_cell, figure_text
from symprune.eval.report.scale import is_drawable
from symprune.eval.tables import percent
from symprune.validation import is_number

CALIBRATION, HELD_OUT = "relative_error", "held_out_error"
ERRORS = {
    "held_out_error_base": "held-out error, base mask",
    HELD_OUT: "held-out error",
    "relative_error_base": "calibration error, base mask",
    CALIBRATION: "calibration error",
    "expected_error_before": "expected error before",
    "expected_error_after": "after",
}
WHERE = {HELD_OUT: "held-out tokens", CALIBRATION: "calibration tokens"}

Layer = Mapping[str, Any]


def number_in(values: Mapping[str, Any], name: str) -> float | None:
    """The number of that name, or None when it was not measured."""
    value = values.get(name)
    return value if is_number(value) else None


def mean(layers: Sequence[Layer], name: str) -> float | None:
    """Over the layers that have it."""
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
        means = {name: mean(members, name) for name in ERRORS}
        merged.append({**entry, **{k: v for k, v in means.items() if v is not None}})
    return merged


def section(layers: Sequence[Layer]) -> str:
    """What differs between the layers; what is the same in all is a sentence."""
    kinds = list(dict.fromkeys(str(layer["kind"]) for layer in layers))
    low = min(layer["sparsity"] for layer in layers)
    high = max(layer["sparsity"] for layer in layers)
    even = percent(low) == percent(high)
    pictures = [*_errors(layers), *_refined(layers)]
    if not even:
        note = f"From {percent(low)} to {percent(high)}."
        sparsity = Axis("sparsity", charts.PERCENT)
        pictures.append(_per_block("Sparsity per layer", note, layers, "sparsity", sparsity))
    told = [page.paragraph(f"Every matrix lost the same {percent(low)}.")] if even else []
    if mean(layers, CALIBRATION) is None and mean(layers, HELD_OUT) is None:
        told.append(page.paragraph("Errors were not measured; --report-error does."))
    shared = charts.legend(kinds) if pictures else ""
    return page.section("Layers", *told, shared, *pictures)


def _errors(layers: Sequence[Layer]) -> list[str]:
    """On held-out tokens beside calibration's, on one scale."""
    measured = [name for name in WHERE if mean(layers, name) is not None]
    note = "‖X(W̃ − W)‖ / ‖XW‖, Frobenius norms; lower is better."
    return _beside(
        layers, {name: f"Relative error on {WHERE[name]}" for name in measured}, note, "error"
    )


def _refined(layers: Sequence[Layer]) -> list[str]:
    """Figures after refinement and update over the same before; nothing where nothing changed."""
    changed: list[Layer] = []
    titles: dict[str, str] = {}
    for layer in layers:
        ratios = {}
        for name, before in (
            *((name, f"{name}_base") for name in WHERE),
            ("expected_error_after", "expected_error_before"),
        ):
            base, after = number_in(layer, before), number_in(layer, name)
            if base and after is not None:
                ratios[f"{name} ratio"] = after / base
        changed.append({**layer, **ratios})
    for name, what in {**WHERE, "expected_error_after": "the expected error of a row"}.items():
        found = [ratio for layer in changed if (ratio := number_in(layer, f"{name} ratio"))]
        if not all(math.isclose(ratio, 1.0) for ratio in found):
            where = f"the error on {what}" if name in WHERE else what
            titles[f"{name} ratio"] = f"What refinement and update did to {where}"
    note = "The final figure ÷ that of the base mask; below 1 is better."
    no_change = Reference("1: no change", 1.0)
    return _beside(changed, titles, note, "final ÷ base", no_change)


def _beside(
    layers: Sequence[Layer],
    titles: Mapping[str, str],
    note: str,
    axis: str,
    reference: Reference | None = None,
) -> list[str]:
    """Figures beside each other on one scale; what follows after two has a row of its own."""
    names = list(titles)
    heights = [v for name in names[:2] for layer in layers if (v := number_in(layer, name))]
    heights = [value for value in heights if is_drawable(value)]
    rows = []
    for pair in (names[:2], names[2:]):
        kinds = charts.BESIDE if len(pair) == 2 else charts.WIDE
        on = heights if pair == names[:2] else []
        drawn = [
            _per_block(titles[name], note, layers, name, Axis(axis), reference, kinds, on)
            for name in pair
        ]
        if drawn:
            rows.append(page.beside(*drawn) if len(drawn) == 2 else drawn[0])
    return rows


def _per_block(
    title: str,
    note: str,
    layers: Sequence[Layer],
    name: str,
    axis: Axis,
    reference: Reference | None = None,
    widths: Sequence[str] = charts.WIDE,
    heights: Sequence[float] = (),
) -> str:
    """A figure of every layer against its block, one line per kind of matrix."""
    kinds: dict[str, list[Point]] = {str(layer["kind"]): [] for layer in layers}
    for layer in layers:
        value = number_in(layer, name)
        if value is not None:
            text = percent(value) if axis.text is charts.PERCENT else figure_text(value)
            block = block_of(layer["name"]) or 0
            kinds[layer["kind"]].append(Point(block, value, f"{layer['name']}\n{text}"))
    series = [Series(kind, points) for kind, points in kinds.items()]
    blocks = Axis("block", whole=True)
    return charts.line_chart(
        title, note, series, blocks, axis, reference,
        kinds=widths, heights=heights, with_legend=False,
    )  # fmt: skip


def table(layers: Sequence[Layer]) -> str:
    """Every pruned matrix, in the model's order."""
    columns = ["block", "matrix", "output × input", "removed", "sparsity", *ERRORS.values(), "name"]
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
                *(figure_cell(number_in(layer, name)) for name in ERRORS),
                TableCell(layer["name"]),
            ]
        )
    return page.table(f"The {len(layers)} pruned matrices in the model's order.", columns, rows)
