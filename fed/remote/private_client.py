"""A client's part in private training: its clipped change, with its share of the noise, behind the
masks of a secure sum.

A session is a set of clients with fresh keys; whoever was away comes back in a new one. A round is
masked once, for one session and one list of participants; it is in the owner's ledger before that.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symprune.errors import OwnersAffair
from symprune.fed.devices import working_on
from symprune.fed.owner.guard import Guard
from symprune.fed.private_users import PrivateUsers
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Received, State, Turn, check
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
from symprune.fed.secure import collector, graph, keys
from symprune.fed.secure.collector import Fields, pack
from symprune.fed.secure.party import Party, Trust
from symprune.fed.wire.envelope import Header, Letter
from symprune.fed.wire.envelope import unpack as read_letter
from symprune.fed.wire.payload import decode_as, encode_message
from symprune.machine import durable
from symprune.validation import has_kinds, parse_json

ENTER, SHARE, SUM, UNMASK = "enter", "share", "sum", "unmask"
OWN = ("client", "counted")  # of a letter's header: what is one client's alone
SESSION = {"session": int, "turn": int, "asked": str, "party": dict}


@dataclass
class Session:
    """What a client remembers of the secure sums of a run: the session, who it is in it, and the
    last round it masked, for which letter."""

    session: int
    party: Party
    turn: int = -1
    asked: str = ""


def concerns(letter: Letter) -> bool:
    return letter.header.get("kind") in (ENTER, SHARE, SUM, UNMASK)


def answer(letter: Letter, node: Node) -> Letter:
    """The reply to a letter about a secure sum of a private run."""
    header, job = letter.header, read_job(letter.header, node)
    check(bool(job.private), "A secure sum was asked for in a run that promises nothing.")
    guard, file = guard_job(job, node), session_file(node.folder, str(header["run"]))
    trust = _trust(node, guard)
    algorithm = job.build_algorithm()
    algorithm.check_across_machines()
    assert isinstance(algorithm, PrivateUsers)
    _offer(guard, algorithm)
    known, session = load_session(file), int(header["session"])
    if header["kind"] == ENTER:
        return _enter(known, session, node, trust, file)
    check(known is not None, f"Client {node.number} has not entered this run.")
    assert known is not None
    check(known.session == session, f"Client {node.number} is not in session {session}.")
    check(len(letter.parts) >= 1, "A letter about a secure sum brings nothing.")
    if header["kind"] == SHARE:
        dealt = _share(known.party, letter, trust, job)
        save_session(file, known)
        return Letter({"status": "shared"}, (encode_message(dealt),))
    if header["kind"] == UNMASK:
        reply = _unmask(known.party, letter, guard, job)
        save_session(file, known)
        return Letter({"status": "unmasked"}, (encode_message(reply),))
    return _sum(known, letter, node, guard, algorithm, file)


def session_file(folder: Path, run: str) -> Path:
    return record_file(folder, run).with_suffix(".sums.json")


def _trust(node: Node, guard: Guard) -> Trust:
    key, peers = node.config.get("node_key"), node.config.get("peers")
    own, others = (None if not at else Path(str(at)) for at in (key, peers))
    least = max(int(node.config.get("least_clients", 2)), guard.policy.least_clients)
    return Trust(own, others, least)


def _offer(guard: Guard, algorithm: PrivateUsers) -> None:
    """Refuse early what the owner does not allow: noise, clip, whose noise is counted on."""
    promised = algorithm.promised
    guard.promise(algorithm.releases(1), promised.clip, (promised.honest or 1) > 1)


def _enter(known: Session | None, session: int, node: Node, trust: Trust, file: Path) -> Letter:
    """New keys for a new session; a round that was masked stays masked."""
    before = -1 if known is None else known.session
    check(session >= before, f"Client {node.number} was in session {before} already.")
    if known is None or session > before:
        party, last = Party.enter(node.number, trust), (-1, "")
        known = Session(session, party, *(last if known is None else (known.turn, known.asked)))
        save_session(file, known)
    card = pack([known.party.card], keys.CARD_BYTES)[0]
    return Letter({"status": "entered"}, (encode_message({"card": card}),))


def _share(party: Party, letter: Letter, trust: Trust, job: TrainingJob) -> Fields:
    """Shares for the first sum of a session, if enough others are in it for the promised noise."""
    count = _count(letter.header, job)
    cards = (torch.uint8, (count, keys.CARD_BYTES))
    asked = decode_as(letter.parts[0], {"roster": (torch.int64, (count,)), "cards": cards})
    honest, least = job.promised.honest or 1, graph.assured(count)
    check(
        honest <= least,
        f"Each client is told to count on {honest} honest ones; in a sum of {count} there may be "
        f"as few as {least}.",
    )
    return collector.mail(party.share(collector.named(asked["roster"], asked["cards"]), trust))


def _count(header: Header, job: TrainingJob) -> int:
    count = int(header["count"])
    check(0 < count <= job.clients, f"A sum of {count} clients of {job.clients} was asked for.")
    return count


def _unmask(party: Party, letter: Letter, guard: Guard, job: TrainingJob) -> Fields:
    count, index = _count(letter.header, job), int(letter.header["index"])
    guard.cohort(count)  # who is said to be left counts as well
    asked = decode_as(letter.parts[0], collector.asked_to_unmask(count))
    return collector.answer_unmask(party, index, asked)


def _sum(
    known: Session, letter: Letter, node: Node, guard: Guard, algorithm: PrivateUsers, file: Path
) -> Letter:
    """One round: listen, work, clip, add the share of the noise, mask."""
    header, job = letter.header, read_job(letter.header, node)
    check(len(letter.parts) == 2, "A round of a private run is a broadcast and a secure sum.")
    problem = own_problem(header, job, node, guard)
    turn, counted = read_turn(header, job)
    asked = hashlib.sha256(letter.pack()).hexdigest()
    place = record_file(node.folder, str(header["run"]))
    record = load_record(place, problem.device)
    if record is not None and known.asked == asked and record.reply:
        return read_letter(record.reply)
    twice = f"Client {node.number} was asked twice for round {turn.number}"
    check(turn.number > known.turn, f"{twice}: the difference of two sums would tell its own part.")
    count = _count(header, job)
    guard.cohort(count)
    algorithm = replace(algorithm, inner=algorithm.inner.located(problem.layout))
    received = read_broadcast(letter, algorithm, problem)
    request = decode_as(letter.parts[1], collector.request_fields(count))
    state = None if record is None else record.state(counted)
    with working_on(problem.device):
        if state is None:  # its disk was lost: nobody else knows what was on it
            state = begin_anew(algorithm, problem, turn)
        heard = algorithm.listen(state, received, turn)
        worked, numbers = _work(heard, received, problem, turn, guard, algorithm, header)
    record = Record(counted, turn.number, heard, worked)
    others = collector.named(request["participants"], request["letters"])
    about = (f"round {turn.number}", _story(letter))
    masked, signature = known.party.mask(int(header["index"]), others, *about, numbers)
    fields = {**masked, "agreed": pack([signature], keys.SIGNATURE_BYTES)[0]}
    done = {"status": "done", "turn": turn.number, "bits": 64 * problem.dimension}
    record.reply = Letter(done, (encode_message(fields),)).pack()
    known.turn, known.asked = turn.number, asked
    save_session(file, known)
    save_record(place, record)
    return read_letter(record.reply)


def _story(letter: Letter) -> bytes:
    """What all clients must have been told alike before one unmasks anything: the job with all that
    it promises, the round, and the broadcast."""
    common = {name: value for name, value in letter.header.items() if name not in OWN}
    told = json.dumps(common, sort_keys=True).encode()
    return keys.digest(told, letter.parts[0])


def _work(
    heard: State, received: Received, problem: Problem, turn: Turn, guard: Guard,
    algorithm: PrivateUsers, header: Header,
) -> tuple[State, Fields]:  # fmt: skip
    """What the client is to add to the sum, whole numbers, once it is in its owner's ledger."""
    promised, rows = algorithm.promised, int(problem.counts[0])
    what, shared = algorithm.inner.name, (promised.honest or 1) > 1
    release = algorithm.releases(rows)
    guard.step(release, promised.clip, rows, str(header["run"]), what, shared)
    with of_the_owner():
        state, message = algorithm.client_step(heard, received, problem, turn)
    return state, {name: v[0].cpu() for name, v in message.items() if isinstance(v, Tensor)}


def save_session(file: Path, known: Session) -> None:
    """Readable by its owner only: it holds the secrets of the sums."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    plain = {**vars(known), "party": known.party.to_dict()}
    with durable.replace_file(file, 0o600) as new:
        new.write_text(json.dumps(plain))


def load_session(file: Path) -> Session | None:
    """None if there is none; one that is damaged is refused, for what was masked is not known."""
    if not file.exists():
        return None
    try:
        plain: Any = parse_json(file.read_text())
        if not has_kinds(plain, SESSION):
            raise ValueError("it is not what a client remembers of its sums")
        party = Party.from_dict(plain["party"])
        return Session(plain["session"], party, plain["turn"], plain["asked"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise OwnersAffair(f"The client's memory of its sums {file} is corrupt: {error}.") from None
