"""A client on its own machine: a letter comes in, a letter goes out, the state stays on its disk.

The disk keeps two states: the one after listening and the one after working. The server says which
reply of this client it counted last; work that was not counted is undone, so that control variates
and masks on both sides stay those of one and the same history.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from symprune.errors import OwnersAffair, SympruneError
from symprune.fed.devices import MAIN_MEMORY, working_on
from symprune.fed.owner.audit import note
from symprune.fed.owner.guard import Guard
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import check
from symprune.fed.remote import private_client
from symprune.fed.remote.job import TrainingJob
from symprune.fed.remote.owned import (
    begin_anew,
    guard_job,
    of_the_owner,
    own_problem,
    read_broadcast,
    read_job,
    read_turn,
)
from symprune.fed.remote.records import Record, load_record, record_file, save_record
from symprune.fed.remote.transport import Node
from symprune.fed.threads import limited_threads
from symprune.fed.wire.envelope import Letter, unpack
from symprune.fed.wire.parcel import Parcel
from symprune.machine.lock import alone

log = logging.getLogger("symprune.fed")
UNTOLD = "it could not answer; why is in its owner's audit log"


def answer(data: bytes, node: Node) -> bytes:
    """The reply to a letter, whatever is in it. What is wrong with the letter, or refused, is a
    reply, too; of what goes wrong among the owner's own things the server learns that it did, and
    of an error that nobody foresaw the kind; the owner's log and audit log have the rest."""
    try:
        letter = unpack(data)
        with limited_threads():
            if letter.header.get("kind") == "describe":
                return _describe(letter, node).pack()
            with alone(node.lock):
                if private_client.concerns(letter):
                    return private_client.answer(letter, node).pack()
                return _take_part(letter, node).pack()
    except OwnersAffair as error:
        log.warning("Client %s did not answer: %s", node.number, error)
        note(node.folder, node.config, {"client": node.number, "not_told": str(error)})
        return Letter({"status": "error", "reason": UNTOLD}).pack()
    except SympruneError as error:
        return Letter({"status": "error", "reason": str(error)}).pack()
    except Exception as error:  # a server's bytes must not end a client
        log.exception("Client %s could not answer a letter.", node.number)
        kind = type(error).__name__
        note(node.folder, node.config, {"client": node.number, "not_told": repr(error)})
        return Letter({"status": "error", "reason": f"it could not answer ({kind})"}).pack()


def _describe(letter: Letter, node: Node) -> Letter:
    """What the step sizes are computed from: rows, and, where the owner asks for no protection of
    what follows from them, smoothness and strong convexity. In a private run all clients are alike:
    how many rows they have is nobody's business."""
    job = read_job(letter.header, node)
    guard = guard_job(job, node)
    problem = own_problem(letter.header, job, node, guard)
    with working_on(problem.device):
        constants = problem.constants()
    told = {"L": constants.L[0], "mu": constants.mu[0]} if guard.tells_constants else {}
    known: dict[str, Any] = {
        name: told[name] if math.isfinite(told.get(name, math.nan)) else None
        for name in ("L", "mu")
    }
    own, rows = guard.data is not None, 1 if job.private else constants.sizes[0]
    size = {"rows": rows, "dimension": problem.dimension, "own": own}
    return Letter({"status": "described", **known, **size})


def _take_part(letter: Letter, node: Node) -> Letter:
    """One turn: listen, and work if asked to."""
    header, job = letter.header, read_job(letter.header, node)
    check(not (job.private and header["work"]), "A private run has no work outside of its sums.")
    guard = guard_job(job, node)
    problem = own_problem(header, job, node, guard)
    with working_on(problem.device):
        return _take_turn(letter, node, job, guard, problem)


def _take_turn(
    letter: Letter, node: Node, job: TrainingJob, guard: Guard, problem: Problem
) -> Letter:
    """The same where the problem is, as whatever it makes."""
    header, file = letter.header, record_file(node.folder, str(letter.header["run"]))
    turn, counted = read_turn(header, job)
    record = load_record(file, problem.device)
    algorithm = job.build_algorithm().located(problem.layout)
    received = read_broadcast(letter, algorithm, problem)
    if record is None or (record.turn, record.counted) != (turn.number, counted):
        state = None if record is None else record.state(counted)
        if state is None and (counted < 0 or len(letter.parts) > 1):
            state = begin_anew(algorithm, problem, turn, letter.parts[1:])
        if state is None:
            return Letter({"status": "lost"})
        record = Record(counted, turn.number, algorithm.listen(state, received, turn))
    if not header["work"]:
        save_record(file, record)
        return Letter({"status": "heard", "turn": turn.number})
    if not record.reply:  # a turn that is asked for again gets the same bytes again
        algorithm.check_across_machines()
        rows, clip = int(problem.counts[0]), float(getattr(algorithm, "clip", None) or math.nan)
        guard.step(algorithm.releases(rows), clip, rows, str(header["run"]), algorithm.name)
        with of_the_owner():
            record.worked, message = algorithm.client_step(record.heard, received, problem, turn)
        parcel = Parcel(message, 1, reply=True)
        parcel.check_finite(f"{algorithm.name}: the reply of client {node.number}")
        done = {"status": "done", "turn": turn.number, "bits": int(parcel.bits()[0])}
        with working_on(MAIN_MEMORY):
            record.reply = Letter(done, (parcel.encode(0),)).pack()
    save_record(file, record)
    return unpack(record.reply)
