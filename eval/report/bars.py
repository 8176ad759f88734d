"""Bars: one figure of several things, each a bar from zero with its number at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from symprune.eval.report import charts
from symprune.eval.report.scale import Scale

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
    return charts.figure(title, note, "".join(_bars(bars, kind, title) for kind in charts.WIDTHS))


def _bars(bars: Sequence[Bar], kind: str, title: str) -> str:
    above = kind == "narrow"
    step = 46.0 if above else 30.0
    longest = max(len(bar.label) for bar in bars)
    left = 0.0 if above else min(16 + 7.4 * longest, 380.0)
    room = 14 + 8.0 * max(len(bar.text) for bar in bars)
    highest = max(bar.value for bar in bars) or 1.0
    scale = Scale(0.0, highest, left, charts.WIDTHS[kind] - room)
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
