"""Tables a person can read, made from the plain record a program reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def summary(record: Mapping[str, Any]) -> Table:
    """What a run did: perplexity before and after, sparsity, time, memory, size."""
    table = Table(title=f"{record['model']}: {record['description']}", title_justify="left")
    table.add_column("", style="bold")
    table.add_column("dense", justify="right")
    table.add_column("pruned", justify="right")
    for entry in record.get("perplexity", []):
        label = f"perplexity, {entry['data']} ({entry['windows']} x {entry['seqlen']} tokens)"
        table.add_row(label, f"{entry['dense']:.2f}", f"{entry['pruned']:.2f}")
    kept = record["parameters"] - record["removed"]
    table.add_row("non-zero weights", f"{record['parameters']:,}", f"{kept:,}")
    table.add_row("sparsity of the decoder blocks' matrices", "", percent(record["sparsity"]))
    table.add_row("sparsity of the whole model", "", percent(1 - kept / record["parameters"]))
    seconds = record["seconds"]
    table.add_row("time to prune", "", f"{sum(seconds.values()):.1f} s")
    table.add_row("peak memory", "", size(record["peak_memory_bytes"]))
    if "output_bytes" in record:
        table.add_row("size on disk", "", size(record["output_bytes"]))
    return table


def by_kind(layers: Sequence[Mapping[str, Any]]) -> Table:
    """Achieved sparsity per kind of layer."""
    totals: dict[str, list[int]] = {}
    for layer in layers:
        entry = totals.setdefault(layer["kind"], [0, 0, 0])
        entry[0] += 1
        entry[1] += layer["removed"]
        entry[2] += layer["rows"] * layer["columns"]
    table = Table(title="Sparsity per kind of layer", title_justify="left")
    table.add_column("kind", style="bold")
    for name in ("matrices", "weights", "removed", "sparsity"):
        table.add_column(name, justify="right")
    for kind, (count, removed, weights) in totals.items():
        row = (str(count), f"{weights:,}", f"{removed:,}", percent(removed / weights))
        table.add_row(kind, *row)
    return table


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def size(count: float) -> str:
    """Bytes in the unit a person would pick."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
