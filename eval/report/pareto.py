"""What nothing else beats: perplexity against a cost, with the frontier joined and numbered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

from symprune.eval.report import charts
from symprune.eval.report.charts import Axis, Point, Reference, Series
from symprune.eval.report.page import figure_text
from symprune.eval.report.scale import is_drawable

MOST_NAMED = 12


@dataclass(frozen=True)
class Choice:
    """Something that could be had: its cost and its perplexity."""

    name: str
    cost: float
    perplexity: float


def frontier(choices: Sequence[Choice]) -> list[Choice]:
    """Those that no other one beats in one of the two without losing in the other; by cost."""
    best: list[Choice] = []
    for choice in sorted(choices, key=lambda one: (one.cost, one.perplexity)):
        if not best or choice.perplexity < best[-1].perplexity:
            best.append(choice)
    return best


def figure(
    title: str,
    note: str,
    choices: Sequence[Choice],
    axis: str,
    cost_text: Callable[[float], str],
    *,
    dense: float | None = None,
    falls: bool = False,
) -> str:
    """The picture; nothing where all cost the same. falls: more is better, as it is of speed."""
    drawn = [one for one in choices if is_drawable(one.cost) and is_drawable(one.perplexity)]
    if len({one.cost for one in drawn}) < 2:
        return ""
    turned = [replace(one, cost=-one.cost) for one in drawn] if falls else drawn
    best = [replace(one, cost=abs(one.cost)) for one in frontier(turned)]

    def points(shown: Sequence[Choice], numbered: bool) -> list[Point]:
        return [
            Point(
                one.cost,
                one.perplexity,
                f"{one.name}\n{cost_text(one.cost)}, perplexity {figure_text(one.perplexity)}",
                mark=str(number) if numbered else "",
            )
            for number, one in enumerate(shown, start=1)
        ]

    others = [one for one in drawn if one not in best]
    series = [Series("beaten by none", points(best, True))]
    if others:
        series.append(Series("the others", points(others, False), joined=False))
    reference = None
    if dense is not None and is_drawable(dense):
        reference = Reference(f"dense {figure_text(dense)}", dense)
    picture = charts.line_chart(
        title,
        note,
        series,
        Axis(axis, fitted=True),
        Axis("perplexity, lower is better"),
        reference,
    )
    named = "".join(
        f'<li data-tip="{escape(one.name)}">{escape(one.name)}: {escape(cost_text(one.cost))}, '
        f"{figure_text(one.perplexity)}</li>"
        for one in best[:MOST_NAMED]
    )
    return picture.replace("\n</figure>", f'\n<ol class="frontier">{named}</ol>\n</figure>')
