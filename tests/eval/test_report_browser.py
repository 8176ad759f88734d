"""The pages in a real browser: they render, sort, filter, answer keys, and fit a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from reports import Page

from symprune.eval import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def browse(page: Path, width: int, profile: Path) -> tuple[str, str]:
    """The page's DOM after its script ran in a real browser, and what the console said."""
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--disable-dev-shm-usage", "--enable-logging=stderr", "--v=0",
        f"--user-data-dir={profile}", f"--window-size={width},900", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run(
        [str(CHROMIUM), *flags, page.as_uri()], capture_output=True, text=True, timeout=90
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)


PROBE = """<script>
const seen = {};
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
const chart = document.querySelector("svg.chart");
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
const look = (page) => ({
  fits: page.documentElement.scrollWidth <= page.documentElement.clientWidth,
  drawn: [...page.querySelectorAll("svg.chart, img")]
    .filter((one) => one.getBoundingClientRect().height > 40).length,
  // What is wider than its place can be scrolled to, and is nowhere cut off.
  clipped: [...page.querySelectorAll("table, pre, figcaption, dd")].filter((one) =>
    one.getBoundingClientRect().right > page.documentElement.clientWidth
    && !one.closest(".scroll, .command pre")).length,
});
seen.wide = look(document);
document.currentScript.remove();
const phone = document.createElement("iframe");
phone.style = "width: 390px; height: 844px; border: 0";
phone.srcdoc = document.documentElement.outerHTML;
phone.onload = () => {
  seen.phone = look(phone.contentDocument);
  phone.remove();
  document.title = JSON.stringify(seen);
};
document.body.append(phone);
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("kind", ["sweep", "run"])
def test_a_browser_renders_it_sorts_it_and_complains_of_nothing(
    kind: str, sweep: Path, pruned: Path, tmp_path: Path
) -> None:
    page = report.write(sweep if kind == "sweep" else pruned, tmp_path / "page.html")
    dom, console = browse(page, 1280, tmp_path / "profile")
    assert 'id="tip"' in dom and console == ""

    # The page's own policy forbids any script but its own, so the probe goes into a copy without.
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    head = json.dumps("perplexity" if kind == "sweep" else "calibration error")
    words = json.dumps("stochria" if kind == "sweep" else "mlp.up_proj")
    page.write_text(html.replace("</body>", PROBE % (head, words)))
    dom, console = browse(page, 1280, tmp_path / "profile")
    assert console == ""
    seen = json.loads(Page(dom).text.strip().splitlines()[0])
    assert seen["up"] == sorted(seen["up"]) != seen["down"] == sorted(seen["up"], reverse=True)
    hidden, rows = (2, [8 + 16, 4 + 12, 4 + 4, 0, 8 + 16]) if kind == "sweep" else (3 * 2, None)
    assert seen["sort"] == "descending" and seen["hidden"] == hidden
    assert seen["filtered"] == (rows or [14, 2, 12, 0, 14])
    assert seen["tip"] and seen["keys"] and seen["closed"]
    assert seen["wide"]["fits"] and seen["phone"]["fits"]
    assert seen["wide"]["clipped"] == seen["phone"]["clipped"] == 0
    pictures = 1 if kind == "sweep" else 3 + 2
    assert seen["wide"]["drawn"] == seen["phone"]["drawn"] == pictures
