"""Tables a person can read, made from the plain record a program reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

ERRORS = {
    "calibration": ("relative_error_base", "relative_error"),
    "held-out": ("held_out_error_base", "held_out_error"),
    "of the mean": ("expected_error_before", "expected_error_after"),
}


def summary(record: Mapping[str, Any]) -> Table:
    """What a run did: perplexity before and after, sparsity, time, memory, size."""
    table = Table(title=f"{record['model']}: {record['description']}", title_justify="left")
    table.add_column("", style="bold")
    table.add_column("dense", justify="right")
    table.add_column("pruned", justify="right")
    for entry in record.get("perplexity", []):
        label = f"perplexity, {entry['data']} ({entry['windows']} x {entry['seqlen']} tokens)"
        table.add_row(label, f"{entry['dense']:.2f}", f"{entry['pruned']:.2f}")
        if apart := entry.get("divergence"):
            table.add_row("  KL(dense || pruned), nats a token", "", f"{apart['kl']:.3g}")
            table.add_row("  same likeliest token", "", percent(apart["agreement"]))
    if change := _change(record["layers"], *ERRORS["held-out"]):
        table.add_row("relative error of a layer, held-out tokens", "", change)
    kept = record["parameters"] - record["removed"]
    dense = record["parameters"] + (record.get("experts") or {}).get("weights", 0)
    table.add_row("non-zero weights", f"{dense:,}", f"{kept:,}")
    table.add_row("sparsity of the decoder blocks' matrices", "", percent(record["sparsity"]))
    table.add_row("sparsity of the whole model", "", percent(1 - kept / record["parameters"]))
    if "bits_per_weight" in record:
        bits = f"{record['bits_per_weight']:.2f}"
        before = record.get("dense_bits_per_weight")
        was = f"{before:.2f}" if before else ""
        table.add_row("bits a weight of these matrices, masks and scales included", was, bits)
    seconds = record["seconds"]
    table.add_row("time to prune", "", f"{sum(seconds.values()):.1f} s")
    table.add_row("peak memory", "", size(record["peak_memory_bytes"]))
    if "output_bytes" in record:
        before = size(record["input_bytes"]) if "input_bytes" in record else ""
        table.add_row("size on disk", before, size(record["output_bytes"]))
    return table


def against(found: Mapping[str, Any]) -> Table:
    """How far a model is from another."""
    size = f"{found['windows']} x {found['seqlen']} tokens"
    title = f"Against {found['model']}, {size}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column("", style="bold")
    table.add_column("", justify="right")
    table.add_row("KL, nats a token", f"{found['kl']:.3g}")
    table.add_row("same likeliest token", percent(found["agreement"]))
    return table


def by_kind(layers: Sequence[Mapping[str, Any]]) -> Table:
    """Achieved sparsity per kind of layer."""
    table = _table("Sparsity per kind of layer", "matrices", "weights", "removed", "sparsity")
    for kind, members in _kinds(layers).items():
        removed = sum(layer["removed"] for layer in members)
        weights = sum(layer["rows"] * layer["columns"] for layer in members)
        row = (str(len(members)), f"{weights:,}", f"{removed:,}", percent(removed / weights))
        table.add_row(kind, *row)
    return table


def inspected_by_kind(matrices: Sequence[Mapping[str, Any]]) -> Table:
    """What `inspect` found, per kind of matrix: the least and the most sparse one."""
    table = _table("Per kind of matrix", "matrices", "weights", "zeros", "sparsity", "pattern")
    for kind, members in _kinds(matrices).items():
        zeros, weights = (sum(member[name] for member in members) for name in ("zeros", "size"))
        found = {percent(member["sparsity"]) for member in members}
        ends = (min(m["sparsity"] for m in members), max(m["sparsity"] for m in members))
        sparsity = percent(ends[0]) if len(found) == 1 else " to ".join(map(percent, ends))
        patterns = ", ".join(sorted({member["pattern"] for member in members}))
        table.add_row(kind, str(len(members)), f"{weights:,}", f"{zeros:,}", sparsity, patterns)
    return table


def inspected(matrices: Sequence[Mapping[str, Any]]) -> Table:
    """What `inspect` found, matrix by matrix."""
    table = Table("matrix", "shape", "sparsity", "pattern")
    for matrix in matrices:
        shape = " x ".join(str(n) for n in matrix["shape"])
        name = matrix["name"].removesuffix(".weight")
        table.add_row(name, shape, percent(matrix["sparsity"]), matrix["pattern"])
    return table


def describe_perplexity(entry: Mapping[str, Any]) -> str:
    """What a record says of a text: dense, pruned."""
    where = f"{entry['data']} ({entry['windows']} x {entry['seqlen']} tokens)"
    return f"Perplexity on {where}: {entry['dense']:.2f} dense, {entry['pruned']:.2f} pruned."


def errors_by_kind(layers: Sequence[Mapping[str, Any]]) -> Table:
    """Mean reconstruction error per kind of layer, with the base mask and in the end.

    ||X(W~-W)||_F / ||XW||_F on calibration and on held-out tokens, and the mean size of a row's
    expected error.
    """
    table = _table("Error of a layer's output, base mask -> final", *ERRORS, "exchanged")
    for kind, members in _kinds(layers).items():
        figures = (_change(members, *names) for names in ERRORS.values())
        exchanged = sum(layer.get("exchanged", 0) for layer in members)
        table.add_row(kind, *figures, f"{exchanged:,}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("kind", style="bold")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _kinds(layers: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for layer in layers:
        kinds.setdefault(layer["kind"], []).append(layer)
    return kinds


def _change(layers: Sequence[Mapping[str, Any]], before: str, after: str) -> str:
    first, last = _mean(layers, before), _mean(layers, after)
    return f"{first} -> {last}" if last else ""


def _mean(layers: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [layer[name] for layer in layers if name in layer]
    return f"{sum(values) / len(values):.3g}" if values else ""


def sweep(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The cells of a sweep, seeds together."""
    title = f"{rows[0]['model']}: perplexity on {rows[0]['data']}, dense {rows[0]['dense']:.2f}"
    table = Table("recipe", title=title, title_justify="left")
    valid = any("valid" in row for row in rows)
    names = ("perplexity", "±", *(["validation"] if valid else []), "seeds", "sparsity", "seconds")
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        spread = "" if row["deviation"] is None else f"{row['deviation']:.2f}"
        table.add_row(
            row["description"],
            f"{row['perplexity']:.2f}",
            spread,
            *([f"{row['valid']:.2f}" if "valid" in row else ""] if valid else []),
            str(row["seeds"]),
            percent(row["sparsity"]),
            f"{row['seconds']:.0f}",
        )
    return table


def bench(record: Mapping[str, Any]) -> Table:
    """Models side by side, one column each."""
    rows = record["models"]
    table = Table(title=bench_title(record["plan"]), title_justify="left")
    table.add_column("", style="bold", no_wrap=True)
    for row in rows:
        kind = bench_kind(row).replace(", ", "\n")
        name = Text(row["label"]).append(f"\n{kind}", style="not bold dim")
        table.add_column(name, justify="right", overflow="fold")
    cells: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "decoding, tokens/s": lambda row: f"{row['decode_tokens_per_second']:.1f}",
        "  times the first's": lambda row: f"{row['decode_times_first']:.2f}",
        "prompt, tokens/s": lambda row: f"{row['prefill_tokens_per_second']:.1f}",
        "  times the first's ": lambda row: f"{row['prefill_times_first']:.2f}",
        "time to first token": lambda row: f"{1000 * row['first_token_seconds']:,.0f} ms",
        "memory": lambda row: size(row["memory_bytes"]),
        "size on disk": lambda row: size(row["file_bytes"]),
        "bits a weight": lambda row: f"{row['bits_per_weight']:.2f}",
    }
    for label, text in cells.items():
        if label.startswith(" ") and len(rows) == 1:
            continue
        table.add_row(label, *map(text, rows))
    measured = next((row["perplexity"] for row in rows if row.get("perplexity")), None)
    if measured:
        label = f"perplexity, {measured['data']} ({measured['windows']} x {measured['seqlen']})"
        table.add_row(label, *(f"{row['perplexity']['perplexity']:.2f}" for row in rows))
    return table


def forecast(found: Mapping[str, Any]) -> Table:
    """What a run would take, beside what there is."""
    table = Table(title=f"{found['what']}, {found['where']}", title_justify="left")
    table.add_column("", style="bold")
    for name in ("takes about", "there is"):
        table.add_column(name, justify="right")
    steps = found["seconds_of"]
    if steps:
        table.add_row("time", duration(found["seconds"]), "")
    for name, seconds in steps.items():
        table.add_row(f"  {name}", duration(seconds), "")
    table.add_row("memory at most", size(found["memory_bytes"]), size(found["memory_there"]))
    table.add_row("disk", size(found["disk_bytes"]), size(found["disk_there"]))
    return table


def duration(seconds: float) -> str:
    """`12 s`, `4 min` or `3.5 h`: as exact as an estimate is."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 1 else "under 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def bench_title(plan: Mapping[str, Any]) -> str:
    """What was measured."""
    threads = "1 thread" if plan["threads"] == 1 else f"{plan['threads']} threads"
    rounds = "1 round" if plan["rounds"] == 1 else f"medians of {plan['rounds']} rounds in turns"
    return f"{plan['prompt_tokens']} + {plan['new_tokens']} tokens, {threads}, {rounds}"


def bench_kind(row: Mapping[str, Any]) -> str:
    """What a model is in memory, and what runs it."""
    values = f"packed {' and '.join(row['packed'])}" if row.get("packed") else row["dtype"]
    return f"{values}, {row['engine']}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def size(count: float) -> str:
    """Bytes in the unit a person would pick."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
