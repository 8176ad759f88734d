"""How a run goes, for programs: a line of JSON per round, and the last round as Prometheus text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from symprune.machine import durable

LINES, TEXT = "metrics.jsonl", "metrics.prom"


def write_metrics(folder: Path, record: Mapping[str, Any], run: str) -> None:
    """Add a round's record, for collectors that read files (node_exporter's textfile, for one)."""
    durable.append_line(folder / LINES, json.dumps({"run": run, **record}))
    durable.write_text(folder / TEXT, prometheus(record, run))


def prometheus(record: Mapping[str, Any], run: str) -> str:
    """Every number of a record as a gauge."""
    lines = []
    for name, value in record.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            shown = repr(float(value)) if math.isfinite(value) else "NaN"
            metric = f"symprune_fed_{name}"
            lines += [f"# TYPE {metric} gauge", f'{metric}{{run="{run}"}} {shown}']
    return "\n".join(lines) + "\n"
