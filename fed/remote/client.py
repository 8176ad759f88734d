"""A client on its own machine: a letter comes in, a letter goes out, the state stays on its disk.

The disk keeps two states: the one after listening and the one after working. The server says which
reply of this client it counted last; work that was not counted is undone, so that control variates
and masks on both sides stay those of one and the same history.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Algorithm, State, Turn, check
from symprune.fed.remote.job import TrainingJob
from symprune.fed.remote.transport import Node
from symprune.fed.threads import limited_threads
from symprune.fed.wire.envelope import Header, Letter, unpack
from symprune.fed.wire.parcel import Parcel, collect
from symprune.machine import durable

VERSION = "1"


@dataclass
class Record:
    """What a client keeps between two letters."""

    counted: int  # the last turn whose work is part of `heard`; -1: none
    turn: int  # the last turn it heard
    heard: State  # after listening to that turn
    worked: State | None = None  # after working in that turn
    reply: bytes = b""

    def state(self, counted: int) -> State | None:
        """The state that fits the server's count, if this is one of the two."""
        if self.worked is not None and counted == self.turn:
            return self.worked
        return self.heard if counted == self.counted else None


def answer(data: bytes, node: Node) -> bytes:
    """The reply to a letter. What goes wrong for a reason that can be named is a reply, too."""
    try:
        letter = unpack(data)
        with limited_threads():
            if letter.header.get("kind") == "describe":
                return _describe(letter, node).pack()
            return _take_part(letter, node).pack()
    except SympruneError as error:
        return Letter({"status": "error", "reason": str(error)}).pack()


def _job(header: Header, node: Node) -> TrainingJob:
    names = ("algorithm", "options", "problem", "seed")
    check(all(name in header for name in names), "A letter does not say which job it is about.")
    asked = header.get("client")
    check(asked == node.number, f"Client {node.number} got a letter for client {asked}.")
    return TrainingJob(**{name: header[name] for name in names})


def _own_problem(header: Header, job: TrainingJob, node: Node) -> Problem:
    """The client's rows, its owner's if there are any, and the masks, which must be the server's
    wherever the client has them from."""
    data, masks = (node.config.get(name) for name in ("data", "masks"))
    masked = job.problem.get("masks") is not None
    own = str(masks) if masked and masks is not None else None
    problem = job.client_problem(node.number, None if data is None else str(data), own)
    same = problem.layout.digest == header.get("masks", "")
    check(same, f"Client {node.number} has other masks than the server.")
    return problem


def _describe(letter: Letter, node: Node) -> Letter:
    """What the step sizes are computed from: rows, smoothness, strong convexity."""
    problem = _own_problem(letter.header, _job(letter.header, node), node)
    constants = problem.constants()
    known: dict[str, Any] = {
        "L": constants.L[0] if math.isfinite(constants.L[0]) else None,
        "mu": constants.mu[0] if math.isfinite(constants.mu[0]) else None,
    }
    own, rows = "data" in node.config, constants.sizes[0]
    size = {"rows": rows, "dimension": problem.dimension, "own": own}
    return Letter({"status": "described", **known, **size})


def _take_part(letter: Letter, node: Node) -> Letter:
    """One turn: listen, and work if asked to."""
    header, job = letter.header, _job(letter.header, node)
    file = record_file(node.folder, str(header["run"]))
    number, counted = int(header["turn"]), int(header["counted"])
    record, problem = _load(file), _own_problem(header, job, node)
    turn = Turn(number, job.seed, int(header["n"]), torch.tensor([node.number]))
    algorithm = job.build_algorithm().located(problem.layout)
    received = collect([letter.parts[0]])
    if record is None or (record.turn, record.counted) != (number, counted):
        state = None if record is None else record.state(counted)
        if state is None and (counted < 0 or len(letter.parts) > 1):
            state = _anew(algorithm, problem, turn, letter.parts[1:])
        if state is None:
            return Letter({"status": "lost"})
        record = Record(counted, number, algorithm.listen(state, received, turn))
    if not header["work"]:
        _save(file, record)
        return Letter({"status": "heard", "turn": number})
    if not record.reply:  # a turn that is asked for again gets the same bytes again
        record.worked, message = algorithm.client_step(record.heard, received, problem, turn)
        parcel = Parcel(message, 1, reply=True)
        parcel.check_finite(f"{algorithm.name}: the reply of client {node.number}")
        done = {"status": "done", "turn": number, "bits": int(parcel.bits()[0])}
        record.reply = Letter(done, (parcel.encode(0),)).pack()
    _save(file, record)
    return unpack(record.reply)


def _anew(algorithm: Algorithm, problem: Problem, turn: Turn, memory: tuple[bytes, ...]) -> State:
    """The first state, with what the server remembers of a later one."""
    first = algorithm.client_init(problem, replace(turn, number=0))
    return {**first, **collect(list(memory))}


def record_file(folder: Path, run: str) -> Path:
    """Where a client keeps its state in a run."""
    check(re.fullmatch(r"[0-9a-z-]{1,64}", run) is not None, f"{run!r} is no name for a run.")
    return folder / f"{run}.safetensors"


def client_state(folder: Path, run: str, counted: int) -> State:
    """A client's state as the server counts it, one row."""
    record = _load(record_file(folder, run))
    state = None if record is None else record.state(counted)
    if state is None:
        raise SympruneError(f"{folder} has no state of run {run} after turn {counted}.")
    return state


def _save(file: Path, record: Record) -> None:
    """Readable by its owner only: it is personal."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    tensors = {f"heard/{k}": v.contiguous().clone() for k, v in record.heard.items()}
    if record.worked is not None:
        tensors |= {f"worked/{k}": v.contiguous().clone() for k, v in record.worked.items()}
    reply = np.frombuffer(record.reply, np.uint8).copy()
    tensors["reply"] = torch.from_numpy(reply)
    numbers = {"counted": record.counted, "turn": record.turn, "worked": bool(record.reply)}
    metadata = {"version": VERSION, **{k: str(int(v)) for k, v in numbers.items()}}
    durable.write_tensors(file, tensors, metadata, mode=0o600)


def _load(file: Path) -> Record | None:
    """The record, or None if there is none or it is damaged: then the server helps."""
    if not file.exists():
        return None
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return _record(metadata, tensors) if metadata.get("version") == VERSION else None
    except (SafetensorError, OSError, KeyError, ValueError, TypeError):
        return None


def _record(metadata: dict[str, str], tensors: dict[str, Tensor]) -> Record:
    reply = tensors.pop("reply").numpy().tobytes()
    states: dict[str, State] = {"heard": {}, "worked": {}}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        states[part][name] = tensor
    worked = states["worked"] if metadata["worked"] == "1" else None
    return Record(int(metadata["counted"]), int(metadata["turn"]), states["heard"], worked, reply)
