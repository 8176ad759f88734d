"""The page of a sweep: what is best, how to do it again, pictures, and every cell in a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from symprune.eval.report import bars, charts, opening, page, pareto
from symprune.eval.report.cells import Cell, Group, groups, labels, read
from symprune.eval.report.charts import Axis, Point, Reference, Series
from symprune.eval.report.page import figure_cell, figure_text
from symprune.eval.report.pareto import Choice
from symprune.eval.report.scale import is_drawable
from symprune.wording import in_brackets

MOST_LINES = 12
MOST_DOTS = 40
COSTS: tuple[tuple[str, str, str, str, Callable[[float], str]], ...] = (
    (
        "bits",
        "Perplexity against bits",
        "Bits a weight of the pruned matrices takes when packed: mask, scales and codes.",
        "bits a weight",
        lambda bits: f"{bits:.2f} bits",
    ),
    (
        "seconds",
        "Perplexity against the time to prune",
        "Of the whole cell, its calibration included; the first one also embeds the text.",
        "seconds",
        lambda seconds: f"{seconds:,.1f} s",
    ),
)
"""What a perplexity is held against: a figure of a cell, title, remark, axis, how it is written."""


def build(path: Path) -> str:
    """The page of a sweep's file: a section for every model and held-out text in it."""
    cells = read(path)
    panels = _panels(cells)
    models = list(dict.fromkeys(cell.model for cell in cells))
    title = f"Sweep of {', '.join(models[:3])}" + (" and others" if len(models) > 3 else "")
    count = f"{len(cells)} finished cell{'s' if len(cells) > 1 else ''} in {path.name}"
    sections = [part for panel in panels for part in _panel(panel)]
    return page.document(title, count, sections, first=page.verdict(verdict(cells)))


def verdict(cells: Sequence[Cell]) -> str:
    """What is best, in a sentence for every model and held-out text."""
    panels = _panels(cells)
    return " ".join(_verdict(groups(panel), len(panels) > 1) for panel in panels)


def _panels(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells of every model and held-out text."""
    panels: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        panels.setdefault(cell.panel, []).append(cell)
    return list(panels.values())


def _panel(cells: Sequence[Cell]) -> list[str]:
    first, shown = cells[0], groups(cells)
    text = first.data
    if first.windows and first.seqlen:
        text += f", {first.windows:,} windows of {first.seqlen:,} tokens"
    table = page.table(_caption(shown), *_rows(shown))
    every = []
    if any(len(group.cells) > 1 for group in shown):
        inside = page.table("One row per seed.", *_every_cell(cells))
        every = [page.details(f"All {len(cells)} cells, seed by seed", inside)]
    parts = [_chart(shown), *_frontiers(shown), _constants(cells), table, *every]
    return [
        page.section(f"{first.model} on {text}", page.cards(_cards(shown)), _recipes(shown)),
        page.section("All settings", page.filtered("Filter the settings", *parts)),
    ]


def _verdict(shown: Sequence[Group], several: bool) -> str:
    """`Best of 2 settings: wanda + lsq at 50 % and 2:4; ria at 30 %. Perplexity at 30 % 31.20
    (+4 %), ...`, or of one amount `wanda at 50 %, perplexity 41.10 (+9 %), ...`."""
    found: dict[str, list[str]] = {}
    figures = {}
    for amount, members in _by_amount(shown).items():
        best = _best(members)
        found.setdefault(best.label, []).append(amount)
        figures[amount] = f"{_with_deviation(best)}{_rise(best)}"
    dense = shown[0].first.dense
    settings = len({group.label for group in shown})
    among = f"Best of {settings} settings: " if settings > 1 else ""
    said = "; ".join(f"{label} at {_listed(amounts)}" for label, amounts in found.items())
    where = f"{shown[0].first.model} on {shown[0].first.data}: " if several else ""
    against = "" if dense is None else f", dense {figure_text(dense)}"
    if len(figures) == 1:
        return f"{where}{among}{said}, perplexity {figures[amount]}{against}."
    told = ", ".join(f"{amount} {figure}" for amount, figure in figures.items())
    return f"{where}{among}{said}. Perplexity at {told}{against}."


def _rise(group: Group) -> str:
    dense = group.first.dense
    return "" if dense is None else in_brackets(dense, group.perplexity)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _recipes(shown: Sequence[Group]) -> str:
    """How to make the model of the best setting at each amount."""
    parts = []
    for amount, members in _by_amount(shown).items():
        best = _best(members).first
        inside = opening.recipe_text(best.model, best.recipe)
        parts.append(page.details(f"Make the best at {amount}: {_best(members).label}", inside))
    return "\n".join(parts)


def _frontiers(shown: Sequence[Group]) -> list[str]:
    """Perplexity against what it costs: bits in a packed file, or where all take the same, time."""
    dense = shown[0].first.dense
    for name, title, note, axis, text in COSTS:
        choices = [
            Choice(f"{group.label}, {group.first.amount}", cost, group.perplexity)
            for group in shown
            if (cost := group.mean(name)) is not None
        ]
        if drawn := pareto.figure(title, note, choices, axis, text, dense=dense):
            return [drawn]
    return []


def _by_amount(shown: Sequence[Group]) -> dict[str, list[Group]]:
    """Groups by sparsity, rising, then by pattern."""
    order = sorted(shown, key=lambda g: (g.first.pattern is not None, g.first.asked))
    amounts: dict[str, list[Group]] = {}
    for group in order:
        amounts.setdefault(group.first.amount, []).append(group)
    return amounts


def _best(shown: Sequence[Group]) -> Group:
    """The lowest perplexity; one that is not a number is the worst."""
    return min(shown, key=lambda g: math.inf if math.isnan(g.perplexity) else g.perplexity)


def _cards(shown: Sequence[Group]) -> list[tuple[str, str, str]]:
    dense = shown[0].first.dense
    items = [] if dense is None else [("dense perplexity", figure_text(dense), "nothing pruned")]
    for amount, members in _by_amount(shown).items():
        best = _best(members)
        name = f"best at {amount}" if len(members) > 1 else f"at {amount}"
        items.append((name, _with_deviation(best), best.label))
    return items


def _with_deviation(group: Group) -> str:
    """`62.70 ± 0.31`: the deviation with as many digits after the point as the mean."""
    text = figure_text(group.perplexity)
    if len(group.cells) == 1:
        return text
    digits = len(text.partition(".")[2])
    deviation = figure_text(group.deviation) if "e" in text else f"{group.deviation:,.{digits}f}"
    return f"{text} ± {deviation}"


def _chart(shown: Sequence[Group]) -> str:
    drawn = [group for group in shown if is_drawable(group.perplexity)]
    left_out = len(shown) - len(drawn)
    notes = [f"{left_out} without a finite perplexity are not drawn."] if left_out else []
    if any(len(group.cells) > 1 for group in drawn):
        notes.append("Bars are one standard deviation over the seeds.")
    dense = shown[0].first.dense
    reference = None
    if dense is not None and is_drawable(dense):
        reference = Reference(f"dense {figure_text(dense)}", dense)
    if not drawn:
        return page.paragraph("No cell has a finite perplexity, so there is nothing to draw.")
    if len({group.first.asked for group in drawn if group.first.pattern is None}) > 1:
        return _lines(drawn, notes, reference)
    return _dots(drawn, notes, reference)


def _lines(drawn: Sequence[Group], notes: list[str], reference: Reference | None) -> str:
    named = {group.label: group.label for group in drawn}
    if len(named) > MOST_LINES:
        named = {group.label: _family(group.first) for group in drawn}
        notes.append("Each line is the best setting of its method at every sparsity.")
    series = []
    for name in dict.fromkeys(named.values()):
        members = _by_amount([group for group in drawn if named[group.label] == name])
        series.append(Series(name, [_point(_best(some)) for some in members.values()]))
    if any(group.first.pattern for group in drawn):
        notes.append("Patterns N:M stand beside the axis as open marks.")
    title = "Perplexity against sparsity"
    x, y = Axis("sparsity asked for", charts.PERCENT), Axis("perplexity, lower is better")
    return charts.line_chart(title, " ".join(notes), series, x, y, reference)


def _family(cell: Cell) -> str:
    refinement = cell.settings.get("refine.name", cell.settings.get("refine"))
    return f"{cell.recipe['method']}" + (f" + {refinement}" if refinement else "")


def _point(group: Group) -> Point:
    cell = group.first
    tip = f"{group.label}\n{cell.amount}: {_with_deviation(group)}"
    if len(group.cells) > 1:
        tip += f" ({len(group.cells)} seeds)"
    return Point(cell.asked, group.perplexity, tip, group.deviation, cell.pattern)


def _dots(drawn: Sequence[Group], notes: list[str], reference: Reference | None) -> str:
    """One row per setting, the best on top: what a sweep at one sparsity shows best."""
    ordered = sorted(drawn, key=lambda group: group.perplexity)
    best, worst = ordered[0].perplexity, ordered[-1].perplexity
    if reference is not None and worst - best < (worst - reference.value) / 3:
        # On one axis with a far-off dense model the settings would be one heap.
        notes.append(f"The dense model has {figure_text(reference.value)}, outside the picture.")
        reference = None
    if len(ordered) > MOST_DOTS:
        notes.append(f"The best {MOST_DOTS} of {len(ordered)}; the table has all.")
    amounts = _by_amount(drawn)
    rows = []
    for group in ordered[:MOST_DOTS]:
        point = _point(group)
        name = group.label if len(amounts) == 1 else f"{group.label}, {group.first.amount}"
        rows.append((name, Point(point.y, 0.0, point.tip, point.spread, point.slot)))
    where = f" at {next(iter(amounts))}" if len(amounts) == 1 else ""
    x = Axis("perplexity, lower is better")
    return bars.dot_chart(f"Perplexity{where}", " ".join(notes), rows, x, reference)


def _constants(cells: Sequence[Cell]) -> str:
    """What all cells share and their names therefore leave out."""
    shared = dict(cells[0].settings)
    for cell in cells:
        shared = {k: v for k, v in shared.items() if k in cell.settings and cell.settings[k] == v}
    told = [
        f"{key} {value}"
        for key, value in shared.items()
        if key not in ("method", "refine", "refine.name") and not key.startswith("params.")
    ]
    return page.paragraph(f"The same for all: {', '.join(told)}.") if told else ""


def _caption(shown: Sequence[Group]) -> str:
    text = "Perplexity of every setting; the best at each sparsity is bold."
    if any(len(group.cells) > 1 for group in shown):
        text += " Cells that differ only in their seed: mean ± standard deviation."
    return text


def _rows(shown: Sequence[Group]) -> tuple[list[str], list[list[page.TableCell]]]:
    columns = ["setting", "asked", "perplexity", "seeds", "× dense", "sparsity"]
    columns += ["bits a weight", "held-out error", "calibration error", "seconds"]
    rows = []
    for members in _by_amount(shown).values():
        best = _best(members)
        for group in sorted(members, key=lambda group: group.perplexity):
            rows.append(_row(group, group is best and len(members) > 1))
    return columns, rows


def _row(group: Group, best: bool) -> list[page.TableCell]:
    cell, figure = group.first, group.perplexity
    ratio = figure / cell.dense if cell.dense else None
    return [
        page.TableCell(group.label, strong=best),
        page.TableCell(cell.amount, cell.asked),
        page.TableCell(_with_deviation(group), figure, best),
        figure_cell(len(group.cells), "d"),
        figure_cell(ratio, ".2f"),
        page.TableCell(f"{100 * cell.sparsity:.2f} %", cell.sparsity),
        figure_cell(group.mean("bits"), ".2f"),
        figure_cell(group.mean("held_out_error")),
        figure_cell(group.mean("relative_error")),
        figure_cell(group.mean("seconds"), ".1f"),
    ]


def _every_cell(cells: Sequence[Cell]) -> tuple[list[str], list[list[page.TableCell]]]:
    names = labels(cells)
    rows = [
        [
            page.TableCell(names[cell.series], hint=cell.description),
            page.TableCell(cell.amount, cell.asked),
            page.TableCell(str(cell.recipe.get("seed", "–"))),
            figure_cell(cell.perplexity),
            figure_cell(cell.held_out_error),
            figure_cell(cell.relative_error),
            figure_cell(cell.seconds, ".1f"),
        ]
        for cell in cells
    ]
    columns = ["setting", "asked", "seed", "perplexity", "held-out error", "calibration error"]
    return [*columns, "seconds"], rows
