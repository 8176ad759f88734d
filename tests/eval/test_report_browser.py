"""The pages in a real browser: they render, sort, filter, answer keys, can be read by day and by
night, and fit a phone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import reports
from browser import browse, needs_a_browser
from reports import Page

from symprune.eval import report

LOOK = """
const seen = {};
const channel = (value) => {
  const part = value / 255;
  return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
};
const light = (color) => 0.2126 * channel(color[0]) + 0.7152 * channel(color[1])
  + 0.0722 * channel(color[2]);
const numbers = (text) => {
  const found = text.match(/[\\d.]+/g).map(Number);
  const scale = text.startsWith("color(") ? 255 : 1;
  return [...found.slice(0, 3).map((part) => part * scale), found.length > 3 ? found[3] : 1];
};
const below = (element) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    const color = numbers(getComputedStyle(at).backgroundColor);
    if (color[3] > 0) layers.push(color);
    if (color[3] === 1) break;
  }
  return layers.reverse().reduce((under, over) =>
    under.map((part, place) => place < 3 ? part * (1 - over[3]) + over[place] * over[3] : 1));
};
// Words whose color is too near to what is behind them to be read: WCAG's 4.5 to 1.
const faint = (page) => [...page.querySelectorAll("h1, h2, h3, p, td, th button, caption, dt, dd,"
  + " small, figcaption, summary, code, label, output, .legend button, a, svg.chart text")]
  .filter((one) => one.textContent.trim() && one.checkVisibility())
  .filter((one) => {
    const style = getComputedStyle(one);
    const ink = numbers(one.closest("svg") ? style.fill : style.color);
    const two = [light(ink), light(below(one))].sort((a, b) => b - a);
    return (two[0] + 0.05) / (two[1] + 0.05) < 4.5;
  }).map((one) => one.textContent.trim().slice(0, 40));
// What can be reached by a key or is looked at must say what it is.
const unnamed = (page) => [...page.querySelectorAll("button, input, [tabindex], svg.chart, img")]
  .filter((one) => !(one.getAttribute("aria-label") || one.getAttribute("alt")
    || one.textContent.trim() || one.closest("label")
    || page.getElementById(one.getAttribute("aria-labelledby")))).length;
const focus = (page) => [...page.querySelectorAll("button, input, .scroll, summary, svg.chart")]
  .filter((one) => one.checkVisibility())
  .filter((one) => { one.focus(); return page.activeElement !== one; }).length;
const look = (page) => ({
  fits: page.documentElement.scrollWidth <= page.documentElement.clientWidth,
  drawn: [...page.querySelectorAll("svg.chart, img")]
    .filter((one) => one.getBoundingClientRect().height > 40).length,
  // What is wider than its place can be scrolled to, and is nowhere cut off.
  clipped: [...page.querySelectorAll("table, pre, figcaption, dd")].filter((one) =>
    one.getBoundingClientRect().right > page.documentElement.clientWidth
    && !one.closest(".scroll, .command pre")).length,
  broken: [...page.querySelectorAll(".option")].filter((one) => one.getClientRects().length > 1)
    .length,
  scrolled: [...page.querySelectorAll(".scroll")].every((one) =>
    one.scrollWidth <= one.clientWidth || getComputedStyle(one).overflowX === "auto"),
  faint: faint(page), unnamed: unnamed(page), unfocused: focus(page),
});
"""
FRAMES = """
seen.wide = look(document);
document.currentScript.remove();
const whole = document.documentElement.outerHTML;
const dark = whole.replace("@media (prefers-color-scheme: dark)", "@media all");
const frames = { phone: [390, whole], dark: [1280, dark], night: [390, dark] };
// All are there before the page has loaded: the browser waits for them.
let waiting = Object.keys(frames).length;
for (const name in frames) {
  const one = document.createElement("iframe");
  one.style = `width: ${frames[name][0]}px; height: 844px; border: 0`;
  one.srcdoc = frames[name][1];
  one.onload = () => {
    seen[name] = look(one.contentDocument);
    one.hidden = true;
    waiting -= 1;
    if (!waiting) document.title = JSON.stringify(seen);
  };
  document.body.append(one);
}
"""
ACT = """
const table = document.querySelector("table.sortable");
const column = [...table.querySelectorAll("th")].findIndex((h) => h.innerText.startsWith(%s));
const number = (row) => Number(row.cells[column].dataset.value);
const values = () => [...table.tBodies[0].rows].map(number);
table.querySelectorAll("th button")[column].click();
seen.up = values();
table.querySelectorAll("th button")[column].click();
seen.down = values();
seen.sort = table.querySelectorAll("th")[column].getAttribute("aria-sort");
document.querySelector(".legend button").click();
seen.hidden = document.querySelectorAll("g.series.off").length;
document.querySelector(".legend button").click();
const filter = document.querySelector(".filtered input");
const left = () => document.querySelectorAll(".filtered tbody tr:not([hidden])").length;
const type = (words) => {
  filter.value = words;
  filter.dispatchEvent(new Event("input"));
  return left();
};
seen.filtered = [left(), type(%s), type("-" + filter.value), type("no such thing"), type("")];
"""
KEYS = """
const charts = [...document.querySelectorAll("svg.chart")];
const chart = charts.find((one) => one.getClientRects().length);
const press = (key) => chart.dispatchEvent(new KeyboardEvent("keydown", { key }));
const tip = document.querySelector("#tip");
press("ArrowRight");
const first = tip.textContent;
press("ArrowRight");
seen.keys = !tip.hidden && first !== tip.textContent
  && chart.querySelectorAll(".here").length === 1;
press("Escape");
seen.closed = tip.hidden && tip.getAttribute("role") === "status";
const point = document.querySelector("svg [data-tip]");
point.dispatchEvent(new PointerEvent("pointerover", { bubbles: true, clientX: 9, clientY: 9 }));
seen.tip = document.querySelector("#tip").textContent === point.dataset.tip;
"""


def probe(page: Path, profile: Path, *scripts: str) -> dict[str, Any]:
    """What scripts in a copy of a page find; the page's own policy forbids any but its own."""
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    script = f"<script>{LOOK}{''.join(scripts)}{FRAMES}</script></body>"
    page.write_text(html.replace("</body>", script))
    dom, console = browse(page.as_uri(), 1280, profile)
    assert console == ""
    found: dict[str, Any] = json.loads(Page(dom).text.strip().splitlines()[0])
    return found


def check_looks(seen: dict[str, Any], pictures: int) -> None:
    """At 1280 and at 390 pixels, by day and by night: all fits, and can be read and reached."""
    for name in ("wide", "phone", "dark", "night"):
        found = seen[name]
        assert found["fits"] and found["scrolled"] and found["clipped"] == 0, name
        assert found["broken"] == 0, name
        assert (found["faint"], found["unnamed"], found["unfocused"]) == ([], 0, 0), name
        assert found["drawn"] == pictures, name


@needs_a_browser
@pytest.mark.parametrize("kind", ["sweep", "run"])
def test_a_browser_renders_it_sorts_it_and_complains_of_nothing(
    kind: str, sweep: Path, pruned: Path, tmp_path: Path
) -> None:
    page = report.write(sweep if kind == "sweep" else pruned, tmp_path / "page.html")
    dom, console = browse(page.as_uri(), 1280, tmp_path / "profile")
    assert 'id="tip"' in dom and console == ""

    head = json.dumps("perplexity" if kind == "sweep" else "calibration error")
    words = json.dumps("stochria" if kind == "sweep" else "mlp.up_proj")
    seen = probe(page, tmp_path / "profile", ACT % (head, words), KEYS)
    assert seen["up"] == sorted(seen["up"]) != seen["down"] == sorted(seen["up"], reverse=True)
    hidden, rows = (2, [8 + 16, 4 + 12, 4 + 4, 0, 8 + 16]) if kind == "sweep" else (3 * 2, None)
    assert seen["sort"] == "descending" and seen["hidden"] == hidden
    assert seen["filtered"] == (rows or [14, 2, 12, 0, 14])
    assert seen["tip"] and seen["keys"] and seen["closed"]
    check_looks(seen, 1 if kind == "sweep" else 3 + 2)


@needs_a_browser
@pytest.mark.parametrize("kind", ["compare", "bench"])
def test_models_side_by_side_look_well_at_any_width(kind: str, tmp_path: Path) -> None:
    made, pictures = tmp_path / "page.html", 2
    if kind == "compare":
        report.write_comparison(reports.comparison(), made)
    else:
        report.write_bench(reports.bench(), made)
        pictures = 9
    seen = probe(made, tmp_path / "profile", KEYS)
    assert seen["tip"] and seen["keys"] and seen["closed"]
    check_looks(seen, pictures)
