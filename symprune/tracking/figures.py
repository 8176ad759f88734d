"""What of a run is logged: its blocks, what it came to, the cells of a sweep, federated rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from symprune.tracking.tracker import Tracker

LAYER_FIGURES = ("sparsity", "relative_error", "held_out_error")
CELL_FIGURES = ("perplexity", "valid", "sparsity", "bits_per_weight", "seconds")


def add_step(tracker: Tracker, figures: Mapping[str, Any]) -> None:
    """A step of a run as a meter shows it; logged are blocks that are done."""
    if figures["stage"] == "done":
        found = {
            "progress/tokens_per_second": figures["tokens_per_second"],
            "progress/memory_gigabytes": figures["memory_bytes"] / 1e9,
            "progress/peak_memory_gigabytes": figures["peak_memory_bytes"] / 1e9,
            "progress/minutes": figures["time"] / 60,
        }
        tracker.add("block", figures["block"] - 1, found)


def add_record(tracker: Tracker, record: Mapping[str, Any]) -> None:
    """What a run that prunes came to: every layer, then the whole."""
    blocks: dict[int, dict[str, Any]] = {}
    for layer in record["layers"]:
        number = next((int(part) for part in layer["name"].split(".") if part.isdigit()), 0)
        found = {f"{name}/{layer['kind']}": layer.get(name) for name in LAYER_FIGURES}
        blocks.setdefault(number, {}).update(found)
    for number, found in blocks.items():
        tracker.add("block", number, found)
    whole: dict[str, Any] = {
        "result/sparsity": record["sparsity"],
        "result/bits_per_weight": record.get("bits_per_weight"),
        "result/bytes": record.get("pruned_bytes", record.get("output_bytes")),
        "result/seconds": sum(record["seconds"].values()),
    }
    for entry in record["perplexity"]:
        apart = entry.get("divergence") or {}
        whole |= {f"perplexity/{entry['data']}/{name}": entry[name] for name in ("dense", "pruned")}
        whole |= {f"divergence/{entry['data']}/{name}": value for name, value in apart.items()}
    tracker.add("run", 0, whole)


def add_cell(tracker: Tracker, number: int, cell: Mapping[str, Any]) -> None:
    """A cell of a sweep."""
    names = (*CELL_FIGURES, "relative_error", "held_out_error")
    found = {f"sweep/{name}": cell.get(name) for name in names}
    tracker.add("cell", number, found, str(cell["description"]))


def add_round(tracker: Tracker, record: Mapping[str, Any], name: str = "fed") -> None:
    """An evaluation of a federated run, all it measured and sent so far; name: of the run."""
    found = {f"{name}/{key}": value for key, value in record.items() if key != "round"}
    tracker.add("round", int(record["round"]), found)
