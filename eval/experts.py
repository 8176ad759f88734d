"""What the router gave each expert to do: when experts were dropped, from a record, and now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from symprune.wording import percent_of

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


def summary(load: Mapping[str, Any]) -> str:
    """A sentence about the load of all experts, as it was measured."""
    layers, count = load["layers"], load["count"]
    where = f"{load['text']} ({load['windows']} x {load['seqlen']} tokens)"
    shares = {
        (number, layer["name"]): share
        for layer in layers
        for number, share in enumerate(_shares(layer))
    }
    most, least = (choose(shares, key=lambda each: shares[each]) for choose in (max, min))
    idle = sum(tokens == 0 for layer in layers for tokens in layer["tokens"])
    without = {0: "every expert has work", 1: "1 expert has none"}.get(
        idle, f"{idle} experts have none"
    )
    return (
        f"{count} experts in each of {len(layers)} layers, {load['top_k']} to a token. On {where} "
        f"the router gives most to expert {most[0]} of {most[1]}, {_percent(shares[most])} of its "
        f"layer, least to expert {least[0]} of {least[1]}, {_percent(shares[least])}; "
        f"{percent_of(1 / count)} would be even, and {without}."
    )


def by_layer(load: Mapping[str, Any]) -> Table:
    """The share of every expert in what the router gives out, layer by layer."""
    table = Table("layer", "share of each expert, in order", "busiest", "idlest", "without a token")
    table.title = "Load per expert, by the router's weights"
    for layer in load["layers"]:
        shares = list(_shares(layer))
        idle = [number for number, tokens in enumerate(layer["tokens"]) if tokens == 0]
        ends = (f"{shares.index(end)}: {_percent(end)}" for end in (max(shares), min(shares)))
        table.add_row(Text(layer["name"]), " ".join(map(_percent, shares)), *ends, _list(idle))
    return table


def _shares(layer: Mapping[str, Any]) -> Iterator[float]:
    """Of each expert, what the router's weights of its tokens are of all."""
    total = sum(layer["gates"])
    return (gate / total if total else 0.0 for gate in layer["gates"])


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
