"""A server's run in one file, written after every block: after a crash it goes on from there.

Clients remember the last block they measured, so a block that is asked for again is answered again.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from symprune.engine.report import LayerReport
from symprune.errors import SympruneError
from symprune.fed.pruning.server import Known, Server
from symprune.machine import durable
from symprune.validation import parse_json


def save(path: Path, server: Server, next_block: int, traffic: dict[str, Any]) -> None:
    """What the server knows once the masks in front of `next_block` are decided."""
    report, tensors = server.report, {"ledger": traffic["ledger"]}
    members: dict[str, list[int]] = {}
    for number, known in server.members.items():
        assert known is not None
        members[str(number)] = [known.samples, known.length]
        if known.key is not None:
            tensors[f"key {number}"] = known.key
    tensors |= {f"mask {name}": keep for name, keep in report.masks.items()}
    plain = {
        "next_block": next_block,
        "identity": _identity(server),
        "seqlen": report.seqlen,
        "notes": report.notes,
        "layers": [asdict(layer) for layer in report.layers],
        "members": members,
        "traffic": {name: traffic[name] for name in ("setup", "blocks")},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    durable.write_tensors(path, tensors, {"run": json.dumps(plain)})


def blocks_done(path: Path) -> int:
    """How many blocks a saved run has decided; 0 without one."""
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as opened:
        return int(parse_json(opened.metadata()["run"])["next_block"])


def restore(path: Path, server: Server) -> tuple[int, dict[str, Any]]:
    """Bring a new server to where the saved one was: the next block, and the traffic so far."""
    try:
        with safe_open(path, framework="pt") as opened:
            plain = parse_json((opened.metadata() or {})["run"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise SympruneError(f"The checkpoint {path} is corrupt: {error}.") from error
    for what, mine in _identity(server).items():
        if json.loads(json.dumps(mine)) != plain["identity"].get(what):
            raise SympruneError(f"The checkpoint {path} is of a run with another {what}.")
    report = server.report
    report.seqlen, report.notes = plain["seqlen"], plain["notes"]
    report.layers = [LayerReport(**layer) for layer in plain["layers"]]
    for name, value in tensors.items():
        if name.startswith("mask "):
            report.masks[name.removeprefix("mask ")] = value
    report.masks.apply(server.layout.model)
    server.members = {
        int(number): Known(samples, length, tensors.get(f"key {number}"))
        for number, (samples, length) in plain["members"].items()
    }
    server.skip(plain["next_block"])
    return plain["next_block"], {"ledger": tensors["ledger"], **plain["traffic"]}


def _identity(server: Server) -> dict[str, Any]:
    """What two servers of one run have in common."""
    settings = server.settings
    return {
        "model": bytes(server.digest.tolist()).hex(),
        "recipe": server.report.recipe.to_dict(),
        "number of clients": settings.clients,
        "way of summation": settings.secure,
        "noise": [settings.noise, settings.clip],
        "type to compute in": str(next(server.layout.model.parameters()).dtype),
    }
