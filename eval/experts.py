"""What the router gave each expert to do, from a record."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

MOST_NAMED = 8


def by_expert(experts: Any) -> Table | None:
    """A line for every layer: the load of its experts on the calibration text, as the dense model's
    router shared it out, and which of them were dropped. None where a record has none of it."""
    layers = experts.get("layers") if isinstance(experts, dict) else None
    if not isinstance(layers, list) or not all(map(_is_layer, layers)):
        return None
    table = Table("layer", "tokens per expert", "busiest", "idlest", "dropped")
    table.title = "Load per expert, before experts were dropped"
    for layer in layers:
        tokens, total = layer["tokens"], max(sum(layer["tokens"]), 1)
        shares = [f"{100 * each(tokens) / total:.1f} %" for each in (max, min)]
        table.add_row(Text(layer["name"]), _list(tokens), *shares, _list(layer["dropped"]))
    return table


def _is_layer(layer: Any) -> bool:
    """Whether it is what a run writes of a layer."""
    if not isinstance(layer, dict) or not isinstance(layer.get("name"), str):
        return False
    lists = layer.get("tokens"), layer.get("dropped")
    whole = all(isinstance(each, list) and all(type(n) is int for n in each) for each in lists)
    return whole and bool(layer["tokens"])


def _list(numbers: list[int]) -> str:
    """The first of them; a layer may have hundreds."""
    more = [f"and {len(numbers) - MOST_NAMED} more"] if len(numbers) > MOST_NAMED else []
    return " ".join([*(f"{number:,}" for number in numbers[:MOST_NAMED]), *more])
