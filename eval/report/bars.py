"""Figures of things that have no order, a line each: bars from zero, or dots on an axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from symprune.eval.report import charts
from symprune.eval.report.charts import Axis, Point, Reference
from symprune.eval.report.scale import Scale, fit

THICK = 18.0


@dataclass(frozen=True)
class Bar:
    """A thing, its figure, how that is written, and the colour and tip it has."""

    label: str
    value: float
    text: str
    tip: str
    colour: int = 0


def bar_chart(title: str, note: str, bars: Sequence[Bar]) -> str:
    """Bars in the order given, drawn for a wide page and for a phone."""
    return charts.figure(title, note, "".join(_bars(bars, kind, title) for kind in charts.WIDE))


def _bars(bars: Sequence[Bar], kind: str, title: str) -> str:
    above = kind == "narrow"
    step = 46.0 if above else 30.0
    longest = max(len(bar.label) for bar in bars)
    left = 0.0 if above else min(16 + 7.4 * longest, 380.0)
    room = 14 + 8.0 * max(len(bar.text) for bar in bars)
    highest = max(bar.value for bar in bars) or 1.0
    scale = Scale(0.0, highest, left, charts.SIZES[kind] - room)
    parts = []
    for number, bar in enumerate(bars):
        y = step * (number + 0.5) + (8 if above else 0)
        if above:
            parts.append(
                charts.text_at(left, y - 13, charts.short(bar.label, 46), "start", "label")
            )
        else:
            name = charts.short(bar.label, 50)
            parts.append(charts.text_at(left - 12, y + 4, name, "end", "label"))
        end = max(scale(bar.value), left + 1)
        shape = (
            f'<rect class="bar" x="{left:.1f}" y="{y - THICK / 2:.1f}" '
            f'width="{end - left:.1f}" height="{THICK:g}" rx="2"/>'
        )
        number_beside = charts.text_at(end + 7, y + 4, bar.text, "start", "label")
        parts.append(
            f'<g class="series c{bar.colour % charts.COLOURS}" data-tip="{escape(bar.tip)}">'
            f"{shape}{number_beside}</g>"
        )
    return charts.picture(kind, title, step * len(bars) + 6, parts)


def dot_chart(
    title: str,
    note: str,
    rows: Sequence[tuple[str, Point]],
    x: Axis,
    reference: Reference | None = None,
) -> str:
    """Figures of things that have no order, one line each, in the order given; y is not used."""
    return charts.figure(
        title, note, "".join(_dots(rows, x, reference, kind, title) for kind in charts.WIDE)
    )


def _dots(
    rows: Sequence[tuple[str, Point]], x: Axis, reference: Reference | None, kind: str, title: str
) -> str:
    above = kind == "narrow"
    step, top = (44.0, 30.0) if above else (28.0, 30.0)
    longest = max((len(label) for label, _ in rows), default=0)
    left = 12.0 if above else min(16 + 7.8 * longest, 460.0)
    right, bottom = charts.SIZES[kind] - 24.0, top + step * len(rows)
    scale = fit(charts.extent([(p.x, p.spread) for _, p in rows], reference), left, right)
    parts = [charts.line(left, bottom, right, bottom, "axis")]
    for tick in scale.ticks(4 if above else 8):
        parts.append(charts.line(scale(tick), top - 8, scale(tick), bottom + 5, "grid"))
        parts.append(charts.text_at(scale(tick), bottom + 20, x.text(tick)))
    parts.append(charts.text_at((left + right) / 2, bottom + 42, x.name, style="label"))
    if reference is not None:
        at = scale(reference.value)
        anchor = "end" if at > (left + right) / 2 else "start"
        parts.append(charts.line(at, top - 8, at, bottom, "reference"))
        parts.append(charts.text_at(at, 13, reference.label, anchor, "halo"))
    for number, (label, point) in enumerate(rows):
        y = top + step * (number + 0.5) + (9 if above else 0)
        if above:
            parts.append(
                charts.text_at(left, y - 14, charts.short(label, 44), "start", "label halo")
            )
        else:
            parts.append(charts.text_at(left - 12, y + 4, charts.short(label, 57), "end", "label"))
        inside = []
        if point.spread > 0:
            low, high = max(point.x - point.spread, scale.low), point.x + point.spread
            inside.append(charts.line(scale(low), y, scale(high), y, "error"))
        inside.append(charts.mark(0, scale(point.x), y, point.slot is not None))
        dot = charts.hit(scale(point.x), y, point.tip, "".join(inside))
        parts.append(f'<g class="series c0">{dot}</g>')
    return charts.picture(kind, title, bottom + 50, parts)
