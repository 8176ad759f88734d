"""Curves of a comparison: a metric against uploaded bytes or rounds, mean and range over seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from symprune.fed.compare import FALLING, Line

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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.4, 4.2), constrained_layout=True)
    scale = {"bytes_up": 1 / clients / 1000, "paper_bits_up": 1 / 1000}.get(unit, 1.0)
    for number, line in enumerate(lines):
        length = min(len(history) for history in line.histories)
        x = np.mean([[r[unit] for r in h[:length]] for h in line.histories], 0) * scale
        y = np.array([[r[metric] for r in h[:length]] for h in line.histories])
        if metric in FALLING:
            y = np.maximum(y, floor or 1e-16)
        style = STYLES[number // 10 % len(STYLES)]
        drawn = axis.plot(x, y.mean(0), style, label=line.entry.title, linewidth=1.5)[0]
        if len(y) > 1:
            axis.fill_between(x, y.min(0), y.max(0), color=drawn.get_color(), alpha=0.15, lw=0)
    if metric in FALLING:
        axis.set_yscale("log")
    if unit != "round":
        axis.set_xscale("log")
    axis.set_xlabel(AXES[unit])
    axis.set_ylabel(metric.replace("_", " "))
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
