"""A server's run in one file, written after every block: after a crash it goes on from there.

Clients remember the last block they measured, so a block that is asked for again is answered again.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from symprune.engine.report import LayerReport, is_layer
from symprune.errors import SympruneError
from symprune.fed.pruning import messages
from symprune.fed.pruning.server import Known, Server
from symprune.fed.secure.collector import Collector
from symprune.fed.secure.keys import CARD_BYTES
from symprune.machine import durable
from symprune.validation import has_kinds, parse_json

SAVED = {"next_block": int, "identity": dict, "seqlen": int, "notes": list, "layers": list}
SAVED |= {"members": dict, "traffic": dict, "sums": dict}


def save(path: Path, server: Server, next_block: int, traffic: dict[str, Any]) -> None:
    """What the server knows once the masks in front of `next_block` are decided."""
    report, tensors = server.report, {"ledger": traffic["ledger"]}
    members: dict[str, list[int]] = {}
    for number, known in server.members.items():
        assert known is not None
        members[str(number)] = [known.samples, known.length]
    sums: dict[str, Any] = {}
    if server.rounds is not None:
        sums, sealed = server.rounds.sums.state()
        tensors |= sealed
    tensors |= {f"mask {name}": keep for name, keep in report.masks.items()}
    plain = {
        "next_block": next_block,
        "identity": _identity(server),
        "seqlen": report.seqlen,
        "notes": report.notes,
        "layers": [asdict(layer) for layer in report.layers],
        "members": members,
        "sums": sums,
        "traffic": {name: traffic[name] for name in ("setup", "blocks")},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    if server.settings.weights and next_block:
        _save_weights(path, server, next_block - 1)
    durable.write_tensors(path, tensors, {"run": json.dumps(plain)})


def _save_weights(path: Path, server: Server, block: int) -> None:
    """The updated matrices of a block, in a file of their own that is written once."""
    parameters = messages.parameters(server.layout.matrices(block))
    weights = {name: parameter.detach().cpu() for name, parameter in parameters.items()}
    durable.write_tensors(_weights_file(path, block), weights, {})


def _load_weights(path: Path, server: Server, next_block: int) -> None:
    for block in range(next_block):
        file = _weights_file(path, block)
        parameters = messages.parameters(server.layout.matrices(block))
        try:
            with safe_open(file, framework="pt") as opened:
                for name, parameter in parameters.items():
                    parameter.data.copy_(opened.get_tensor(name))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise SympruneError(f"The checkpoint {file} is corrupt: {error}.") from error


def _weights_file(path: Path, block: int) -> Path:
    return path.with_name(f"{path.stem}-weights-{block:04d}.safetensors")


def remove(path: Path) -> None:
    """A run that is over needs no checkpoint."""
    path.unlink(missing_ok=True)
    for file in path.parent.glob(f"{path.stem}-weights-*.safetensors"):
        file.unlink()


def blocks_done(path: Path) -> int:
    """How many blocks a saved run has decided; 0 without one."""
    return int(_read(path)[0]["next_block"]) if path.exists() else 0


def restore(path: Path, server: Server) -> tuple[int, dict[str, Any]]:
    """Bring a new server to where the saved one was: the next block, and the traffic so far."""
    plain, tensors = _read(path)
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
    done = min(plain["next_block"], len(server.layout.blocks))
    if server.settings.weights:
        _load_weights(path, server, done)
    server.members = {
        int(number): Known(samples, length)
        for number, (samples, length) in plain["members"].items()
    }
    if server.rounds is not None:
        server.rounds.sums = Collector.from_state(plain["sums"], tensors)
    server.skip(done)
    return plain["next_block"], {"ledger": tensors["ledger"], **plain["traffic"]}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What was saved: plain values and tensors, each of its kind."""
    try:
        with safe_open(path, framework="pt") as opened:
            plain = parse_json((opened.metadata() or {})["run"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        _check(plain, tensors)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise SympruneError(f"The checkpoint {path} is corrupt: {error}.") from error
    return plain, tensors


def _check(plain: Any, tensors: dict[str, Tensor]) -> None:
    if not has_kinds(plain, SAVED) or plain["next_block"] < 0 or "ledger" not in tensors:
        raise ValueError("it is not the state of a server")
    if (
        not all(map(is_layer, plain["layers"]))
        or not {"setup", "blocks"} <= plain["traffic"].keys()
    ):
        raise ValueError("what it says of the blocks is not complete")
    for number, counts in plain["members"].items():
        whole = isinstance(counts, list) and [type(count) for count in counts] == [int, int]
        card = tensors.get(f"card {number}", torch.zeros(CARD_BYTES, dtype=torch.uint8))
        fits = card.dtype == torch.uint8 and card.shape == (CARD_BYTES,)
        if not (number.isdecimal() and whole and fits):
            raise ValueError(f"client {number} is not one")


def _identity(server: Server) -> dict[str, Any]:
    """What two servers of one run have in common."""
    settings = server.settings
    return {
        "model": bytes(server.digest.tolist()).hex(),
        "recipe": server.report.recipe.to_dict(),
        "number of clients": settings.clients,
        "way of summation": settings.secure,
        "aggregate": settings.aggregate,
        "number of bits for Gram matrices": settings.gram_bits,
        "noise": [settings.noise, settings.clip],
        "rule against hostile clients": [server.defence.rule, server.defence.value],
        "type to compute in": str(next(server.layout.model.parameters()).dtype),
    }
