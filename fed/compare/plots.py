"""Pictures of runs: a metric against uploaded bytes or rounds, mean and range over seeds, and what
the messages cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from symprune.fed.compare.runs import FALLING, Line

AXES = {
    "bytes_up": "uploaded per client (kB, encoded)",
    "paper_bits_up": "uploaded per client (kbit, 32 per value)",
    "round": "communication rounds",
}
STYLES = ("-", "--", ":", "-.")


def plot(
    lines: list[Line],
    metric: str,
    clients: int,
    path: Path,
    unit: str = "bytes_up",
    title: str = "",
    floor: float | None = None,
) -> None:
    """Save one picture. Falling metrics get a logarithmic axis, cut at `floor`."""
    figure, axis = _canvas()
    scale = {"bytes_up": 1 / clients / 1000, "paper_bits_up": 1 / 1000}.get(unit, 1.0)
    for number, line in enumerate(lines):
        length = min(len(history) for history in line.histories)
        x = np.mean([[r[unit] for r in h[:length]] for h in line.histories], 0) * scale
        y = np.array([[r[metric] for r in h[:length]] for h in line.histories])
        if metric in FALLING:
            y = np.maximum(y, floor or 1e-16)
        if unit != "round":  # nothing was sent yet at the start, which a logarithm cannot show
            x, y = x[1:], y[:, 1:]
        style = STYLES[number // 10 % len(STYLES)]
        drawn = axis.plot(x, y.mean(0), style, label=line.entry.title, linewidth=1.5)[0]
        if len(y) > 1:
            axis.fill_between(x, y.min(0), y.max(0), color=drawn.get_color(), alpha=0.15, lw=0)
    if metric in FALLING:
        axis.set_yscale("log")
    elif unit != "round":
        axis.set_xscale("log")
    _finish(figure, axis, path, (AXES[unit], metric.replace("_", " ")), title)


def plot_traffic(history: list[dict[str, Any]], clients: int, path: Path, title: str = "") -> None:
    """Bytes that an average client has sent and received by every round of a run."""
    figure, axis = _canvas()
    rounds = [record["round"] for record in history]
    for way, style in (("up", "-"), ("down", "--")):
        sizes = [record[f"bytes_{way}"] / clients / 1000 for record in history]
        axis.plot(rounds, sizes, style, label=way, linewidth=1.5)
    _finish(figure, axis, path, (AXES["round"], "sent per client so far (kB, encoded)"), title)


def plot_bill(lines: list[Line], clients: int, path: Path, title: str = "") -> None:
    """What a round costs a client, up and down, a pair of bars for every method."""
    figure, axis = _canvas()
    place = np.arange(len(lines))
    for way, shift in (("up", -0.2), ("down", 0.2)):
        sizes = [line.per_round(f"bytes_{way}") / clients / 1000 for line in lines]
        bars = axis.barh(place + shift, sizes, 0.38, label=way)
        axis.bar_label(bars, [f"{size:.3g}" for size in sizes], fontsize=7, padding=2)
    names = axis.set_yticks(place, [line.entry.title for line in lines])
    for tick in names:
        tick.label1.set_parse_math(False)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    _finish(figure, axis, path, ("per client and round (kB, encoded)", ""), title)


def plot_values(
    x: list[float],
    series: dict[str, list[list[float]]],
    path: Path,
    labels: tuple[str, str],
    title: str = "",
) -> None:
    """Values of several seeds at each x, one curve per name, on a logarithmic axis."""
    figure, axis = _canvas()
    for name, values in series.items():
        mean = [sum(v) / len(v) for v in values]
        drawn = axis.plot(x, mean, marker="o", markersize=4, label=name, linewidth=1.5)[0]
        low, high = [min(v) for v in values], [max(v) for v in values]
        axis.fill_between(x, low, high, color=drawn.get_color(), alpha=0.15, lw=0)
    axis.set_yscale("log")
    from matplotlib.ticker import ScalarFormatter

    axis.yaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_minor_formatter(ScalarFormatter())
    _finish(figure, axis, path, labels, title)


def _canvas() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(6.4, 4.2), constrained_layout=True)


def _finish(figure: Any, axis: Any, path: Path, labels: tuple[str, str], title: str) -> None:
    import matplotlib.pyplot as plt

    axis.set_xlabel(labels[0])
    axis.set_ylabel(labels[1])
    titled = axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    for text in (titled, *axis.legend(fontsize=7, loc="best").get_texts()):
        text.set_parse_math(False)  # names of the user's, not formulas
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
