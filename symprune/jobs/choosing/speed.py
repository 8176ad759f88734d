"""How fast those compared are: a bench of the models among them, on no more tokens than the one
with the shortest context has room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from symprune.jobs.bench import turns
from symprune.jobs.choosing.sources import Source
from symprune.models import hub

FULL = turns.Plan(data=None, rounds=3)
LEAST = 8  # tokens, of which two are new: with fewer, decoding cannot be timed
WANTED = ("decode_tokens_per_second", "prefill_tokens_per_second", "memory_bytes")


def plan_turns(sources: Sequence[Source], device: str) -> tuple[turns.Plan | None, list[str]]:
    """What is measured of every model, None if nothing is, and what the user should know of it."""
    plan, rooms = replace(FULL, device=device), dict[str, int]()
    for source in sources:
        room = None if source.origin is None else hub.max_length(hub.load_config(source.origin))
        if room is not None:
            rooms[source.label] = room
    if all(source.origin is None for source in sources):
        return None, ["Speed was not measured: only results were named, no model."]
    shortest = min(rooms, key=lambda label: rooms[label], default=None)
    if shortest is None or rooms[shortest] >= plan.prompt_tokens + plan.new_tokens:
        return plan, []
    room = rooms[shortest]
    if room < LEAST:
        return None, [f"Speed was not measured: {shortest} has room for {room} tokens only."]
    new = max(2, room // 5)
    note = (
        f"Speed was measured on {room - new} + {new} tokens: {shortest} has room for {room} only."
    )
    return replace(plan, prompt_tokens=room - new, new_tokens=new), [note]


def add_speed(
    record: dict[str, Any],
    sources: Sequence[Source],
    plan: turns.Plan,
    dtype: str,
    access: hub.Access,
    tell: turns.Tell,
    watch: turns.Watch,
) -> dict[str, Any]:
    """The record with what a bench measures of the models in it."""
    given = [source.given for source in sources if source.origin is not None]
    measured = turns.bench(given, plan, dtype, tell, watch, access=access)
    speeds: Mapping[str, Any] = {row["given"]: row for row in measured["models"]}
    for row in record["models"]:
        if row["given"] in speeds:
            row["speed"] = {name: speeds[row["given"]][name] for name in WANTED}
    return {**record, "notes": list(dict.fromkeys([*record["notes"], *measured["notes"]]))}
