"""Pictures as inline SVG: lines over a numeric axis with slots for patterns beside it.

Every chart is drawn twice, for a wide page and for a phone, and the style sheet shows the one that
fits, so that its letters keep their size. A series has a colour, a mark and a dash of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

from symprune.eval.report.scale import Scale, fit, is_drawable, percent_text, tick_text

SIZES = {"wide": 960, "half": 462, "narrow": 350}
WIDE, BESIDE = ("wide", "narrow"), ("half", "narrow")
"""How a chart is drawn on a wide page and on a phone: alone, or with another beside it."""
COLOURS = 8
DASHES = ("", "7 4", "2 4", "9 4 2 4", "12 4", "4 2 1 2")
MARKS = (
    "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
    "M-4.5 -4.5h9v9h-9z",
    "M0 -6L5.5 4.5H-5.5z",
    "M0 -6.5L5.5 0L0 6.5L-5.5 0z",
    "M0 6L5.5 -4.5H-5.5z",
    "M-2 -6h4v4h4v4h-4v4h-4v-4h-4v-4h4z",
    "M-5 -6H5L0 0L5 6H-5L0 0z",
)


@dataclass(frozen=True)
class Point:
    """One figure. `slot` puts it in a column of its own beside the axis instead of at `x`."""

    x: float
    y: float
    tip: str
    spread: float = 0.0
    slot: str | None = None
    mark: str = ""  # written beside it

    @property
    def drawable(self) -> bool:
        return is_drawable(self.y) and is_drawable(self.x)


@dataclass(frozen=True)
class Series:
    """Figures of one thing, joined by a line unless it says otherwise."""

    label: str
    points: Sequence[Point]
    joined: bool = True


@dataclass(frozen=True)
class Axis:
    """What an axis says: its name, how its ticks read, and whether it counts whole things or is of
    any figures, between which round ones are ticks."""

    name: str
    text: Callable[[float], str] = tick_text
    whole: bool = False
    fitted: bool = False


@dataclass(frozen=True)
class Reference:
    """A dashed line at one value, such as the dense model's perplexity."""

    label: str
    value: float


PERCENT = percent_text


def line_chart(
    title: str,
    note: str,
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    reference: Reference | None = None,
    *,
    kinds: Sequence[str] = WIDE,
    heights: Sequence[float] = (),
    with_legend: bool = True,
) -> str:
    """Figures against a number, one line per series. heights: values the vertical axis is to hold
    besides, as charts beside each other have them."""
    drawable = [replace(one, points=[p for p in one.points if p.drawable]) for one in series]
    pictures = "".join(
        _Lines(drawable, x, y, reference, kind, heights).svg(title) for kind in kinds
    )
    below = legend([one.label for one in series]) if with_legend else ""
    return figure(title, note, pictures + below)


def legend(labels: Sequence[str]) -> str:
    """What the lines are; a click on one hides and shows it in every chart of its section."""
    shown = "".join(_legend_item(index, label) for index, label in enumerate(labels))
    return f'<ul class="legend" aria-label="Lines to show">{shown}</ul>'


def figure(title: str, note: str, body: str) -> str:
    small = f"<small>{escape(note)}</small>" if note else ""
    return f"<figure>\n<figcaption>{escape(title)}{small}</figcaption>\n{body}\n</figure>"


def picture(kind: str, title: str, height: float, parts: Sequence[str]) -> str:
    """Arrow keys walk through what has a tip (page.js); the tip is read aloud."""
    return (
        f'<svg class="chart {kind}" viewBox="0 0 {SIZES[kind]} {height:g}" role="img" '
        f'tabindex="0" aria-label="{escape(title)}. Arrow keys read its figures one by one.">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _dash(index: int) -> str:
    dash = DASHES[index % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def mark(index: int, x: float, y: float, is_open: bool = False) -> str:
    extra = " open" if is_open else ""
    shape = MARKS[index % len(MARKS)]
    return f'<path class="mark{extra}" transform="translate({x:.1f} {y:.1f})" d="{shape}"/>'


def _legend_item(index: int, label: str) -> str:
    return (
        f'<li><button type="button" aria-pressed="true" data-series="{index}">'
        f'<svg class="c{index % COLOURS}" viewBox="0 0 38 14" aria-hidden="true">'
        f'<path class="join" d="M1 7H37"{_dash(index)}/>{mark(index, 19, 7)}</svg>'
        f"{escape(label)}</button></li>"
    )


def text_at(x: float, y: float, text: str, anchor: str = "middle", style: str = "") -> str:
    style = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def hit(x: float, y: float, tip: str, inside: str) -> str:
    """A mark with a finger-sized place to point at."""
    circle = f'<circle class="hit" cx="{x:.1f}" cy="{y:.1f}" r="11"/>'
    return f'<g data-tip="{escape(tip)}">{circle}{inside}</g>'


class _Lines:
    """One drawing of a line chart, at one width."""

    def __init__(
        self,
        series: Sequence[Series],
        x: Axis,
        y: Axis,
        reference: Reference | None,
        kind: str,
        besides: Sequence[float],
    ) -> None:
        self.series, self.x_axis, self.y_axis, self.reference = series, x, y, reference
        self.kind = kind
        points = [point for one in series for point in one.points]
        self.slots = list(dict.fromkeys(p.slot for p in points if p.slot is not None))
        self.top, self.bottom = 26.0, (400.0 if kind == "wide" else 290.0)
        heights = extent([(p.y, p.spread) for p in points], reference)
        self.y = fit([*heights, *besides], self.bottom, self.top)
        self.y_ticks = self.y.ticks(6)
        widest = max((len(y.text(tick)) for tick in self.y_ticks), default=1)
        self.left, self.right = 14 + 7.5 * widest, SIZES[kind] - 12.0
        room = 0.42 * (self.right - self.left)
        self.slot_width = min(100.0, room / len(self.slots)) if self.slots else 0.0
        self.end = self.right - self.slot_width * len(self.slots)
        across = [point.x for point in points if point.slot is None]
        self.x = fit(across or [0.0, 1.0], self.left, self.end, x.whole)
        if not x.whole and not x.fitted:
            self.x = _padded(across or [0.0, 1.0], self.left + 14, self.end - 14)

    def svg(self, title: str) -> str:
        parts = self._axes()
        drawn = [self._one(index, one) for index, one in enumerate(self.series)]
        parts += reversed(drawn)  # the first is on top
        parts += self._reference()
        return picture(self.kind, title, self.bottom + 52, parts)

    def _axes(self) -> list[str]:
        parts = [text_at(0, 13, self.y_axis.name, "start", "label")]
        for tick in self.y_ticks:
            parts.append(line(self.left, self.y(tick), self.right, self.y(tick), "grid"))
            parts.append(text_at(self.left - 8, self.y(tick) + 4, self.y_axis.text(tick), "end"))
        for tick in self._x_ticks():
            parts.append(line(self.x(tick), self.bottom, self.x(tick), self.bottom + 5, "axis"))
            parts.append(text_at(self.x(tick), self.bottom + 20, self.x_axis.text(tick)))
        for number, slot in enumerate(self.slots):
            left = self.end + number * self.slot_width
            parts.append(line(left, self.top, left, self.bottom + 5, "axis"))
            parts.append(text_at(left + self.slot_width / 2, self.bottom + 20, slot, style="label"))
        middle = (self.left + self.end) / 2
        parts.append(line(self.left, self.bottom, self.right, self.bottom, "axis"))
        parts.append(text_at(middle, self.bottom + 44, self.x_axis.name, style="label"))
        return parts

    def _x_ticks(self) -> list[float]:
        """Whole numbers for counts; the values themselves when they are few enough."""
        room = max(2, int((self.end - self.left) / (9.0 * 6)))
        if self.x_axis.whole:
            ticks = self.x.ticks(room)
            return [tick for tick in ticks if tick == int(tick)]
        if self.x_axis.fitted:
            return self.x.ticks(room)
        values = sorted({p.x for one in self.series for p in one.points if p.slot is None})
        gaps = [self.x(b) - self.x(a) for a, b in pairwise(values)]
        return values if not gaps or min(gaps) > 46 else self.x.ticks(room)

    def _reference(self) -> list[str]:
        if self.reference is None:
            return []
        y = self.y(self.reference.value)
        return [
            line(self.left, y, self.right, y, "reference"),
            text_at(self.right - 6, y - 6, self.reference.label, "end", "halo"),
        ]

    def _one(self, index: int, one: Series) -> str:
        joined = sorted((p for p in one.points if p.slot is None), key=lambda p: p.x)
        path = " ".join(
            f"{'L' if number else 'M'}{self.x(p.x):.1f} {self.y(p.y):.1f}"
            for number, p in enumerate(joined)
        )
        is_line = one.joined and len(joined) > 1
        parts = [f'<path class="join" d="{path}"{_dash(index)}/>'] if is_line else []
        for point in [*joined, *(p for p in one.points if p.slot is not None)]:
            x, y = self._place(index, point), self.y(point.y)
            if point.spread > 0:
                low = self.y(max(point.y - point.spread, self.y.low))
                parts.append(line(x, low, x, self.y(point.y + point.spread), "error"))
            drawn = mark(index, x, y, point.slot is not None)
            if point.mark:
                drawn += text_at(x, y - 11, point.mark, "middle", "halo")
            parts.append(hit(x, y, point.tip, drawn))
        inside = "".join(parts)
        return f'<g class="series c{index % COLOURS}" data-series="{index}">{inside}</g>'

    def _place(self, index: int, point: Point) -> float:
        """Marks of different series stand side by side in a slot."""
        if point.slot is None:
            return self.x(point.x)
        step = self.slot_width / (len(self.series) + 1)
        return self.end + self.slots.index(point.slot) * self.slot_width + step * (index + 1)


def extent(figures: Sequence[tuple[float, float]], reference: Reference | None) -> list[float]:
    """Every value an axis must hold; a bar that reaches below zero is cut at the axis instead."""
    values = [value for value, _ in figures] + [value + spread for value, spread in figures]
    values += [value - spread for value, spread in figures if value > spread]
    values += [reference.value] if reference is not None else []
    return values or [0.0, 1.0]


def _padded(values: Sequence[float], start: float, end: float) -> Scale:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.05, high + 0.05
    return Scale(low, high, start, end)


def short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
