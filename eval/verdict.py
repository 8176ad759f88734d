"""What a run came to, in one sentence, and what can be done next: from its record alone."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from symprune.eval.tables import size
from symprune.validation import is_number
from symprune.wording import UNCHANGED, difference, percent_of

AS_LARGE = 0.02  # files whose sizes differ by less are as large as each other


def verdict(record: Mapping[str, Any]) -> str:
    """As in `Half the weights gone, perplexity 36.0 -> 58.3 (+62 %), 56 % of the file.`"""
    parts = [_experts(record), _gone(record), _perplexity(record), _size(record)]
    said = ", ".join(part for part in parts if part)
    return " ".join(filter(None, [f"{said[:1].upper()}{said[1:]}." if said else "", _sent(record)]))


def _sent(record: Mapping[str, Any]) -> str:
    """What of it went over the wire, in a federated run."""
    federated = _mapping(record.get("federated"))
    traffic = _mapping(federated.get("traffic"))
    clients, weights = traffic.get("clients"), traffic.get("weights_bytes")
    up, down = traffic.get("bytes_up"), traffic.get("bytes_down")
    if not (type(clients) is int and is_number(weights) and is_number(up) and is_number(down)):
        return ""
    told = f"{clients} clients kept their text" if clients > 1 else "The client kept its text"
    said = f"{told} and exchanged {size(up + down)} with the server"
    share = f"{percent_of((up + down) / weights)} of what the weights would take"
    return f"{said}, {share}." if weights > 0 else f"{said}."


def _gone(record: Mapping[str, Any]) -> str:
    share, recipe = record.get("sparsity"), _mapping(record.get("recipe"))
    if not is_number(share):
        return ""
    values = _mapping(recipe.get("values")).get("name") or recipe.get("values")
    kept = f", the others in {values}" if isinstance(values, str) else ""
    if share == 0 and not kept and _experts(record):
        return ""
    if share == 0:
        return f"all weights kept, in {values}" if kept else "no weight gone"
    pattern = f" ({recipe['pattern']})" if isinstance(recipe.get("pattern"), str) else ""
    # Halves of odd numbers are not exact halves.
    amount = "half" if abs(share - 0.5) < 0.0005 else f"{percent_of(share)} of"
    return f"{amount} the weights gone{pattern}{kept}"


def _experts(record: Mapping[str, Any]) -> str:
    experts = _mapping(record.get("experts"))
    count, left = experts.get("count"), experts.get("left")
    if type(count) is not int or type(left) is not int:
        return ""
    return f"{count - left} of {count} experts of every layer gone"


def change(before: float, after: float) -> str:
    """`36.0 -> 58.3 (+62 %)`, or `unchanged at 36.0`."""
    said = difference(before, after)
    if said == UNCHANGED:
        return f"{UNCHANGED} at {_figure(before)}"
    numbers = f"{_figure(before)} -> {_figure(after)}"
    return f"{numbers} ({said})" if said else numbers


def _figure(number: float) -> str:
    return f"{number:,.0f}" if math.isfinite(number) and number >= 1000 else f"{number:.1f}"


def _perplexity(record: Mapping[str, Any]) -> str:
    entries = record.get("perplexity")
    for entry in entries if isinstance(entries, list) else []:
        figures = _mapping(entry)
        dense, pruned = figures.get("dense"), figures.get("pruned")
        if is_number(dense) and is_number(pruned):
            return f"perplexity {change(dense, pruned)}"
    return ""


def _size(record: Mapping[str, Any]) -> str:
    before, after = record.get("dense_bytes"), record.get("pruned_bytes")
    if not (is_number(before) and is_number(after) and before > 0):
        return ""
    share = after / before
    if abs(share - 1) <= AS_LARGE:
        return "the file as large as before until it is packed"
    if share < 1:
        return f"{100 * share:.0f} % of the file"
    if str(record.get("origin")).endswith(".gguf"):
        return f"the weights {share:.1f} times the .gguf's size ({record.get('dtype')} now)"
    if share < 1.5:
        return f"the file {100 * (share - 1):.0f} % larger"
    return f"the file {share:.1f} times as large"


def is_packed(record: Mapping[str, Any]) -> bool:
    """Whether the run wrote a packed folder."""
    recipe = _mapping(record.get("recipe"))
    return recipe.get("values") is not None or recipe.get("values_head") is not None


def next_steps(record: Mapping[str, Any], folder: str) -> list[tuple[str, str]]:
    """Commands that go on from the folder of a run, and what each is for."""
    here, model = shlex.quote(folder), shlex.quote(str(record.get("model", "MODEL")))
    packed = shlex.quote(f"{folder}-packed")
    smallest, steps = here, []
    if not is_packed(record):
        steps.append((f"symprune pack {here} {packed}", "store it in less space"))
        smallest = packed
    page = shlex.quote(f"{Path(folder).name}.html")
    return [
        *steps,
        (f"symprune bench {model} {smallest}", "speed and memory"),
        (f"symprune report {here} -o {page}", "all of it as a page"),
    ]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
