"""What of a letter's job a client takes on: its owner's rules, and its owner's data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from symprune.errors import OwnersAffair, Refusal, SympruneError
from symprune.fed.devices import MAIN_MEMORY, placed, working_on
from symprune.fed.owner.guard import Guard, guard_of
from symprune.fed.problems.models.fingerprint import digest_of_loss
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Algorithm, Received, State, Turn, check
from symprune.fed.remote.job import TrainingJob, identity
from symprune.fed.remote.transport import Node
from symprune.fed.robust import NONE
from symprune.fed.wire.envelope import Header, Letter
from symprune.fed.wire.parcel import collect


@contextmanager
def of_the_owner() -> Iterator[None]:
    """Work on an owner's rows and files: what goes wrong there may quote them, so that of it a
    server is told nothing but what the owner refuses."""
    try:
        yield
    except Refusal:
        raise
    except SympruneError as error:
        raise OwnersAffair(str(error)) from error


def read_job(header: Header, node: Node) -> TrainingJob:
    names = ("algorithm", "options", "problem", "seed")
    check(all(name in header for name in names), "A letter does not say which job it is about.")
    asked = header.get("client")
    check(asked == node.number, f"Client {node.number} got a letter for client {asked}.")
    guard_of(node.config, None)  # what code may be named from here on, in an option of the job, say
    about = {name: header[name] for name in names}
    return TrainingJob(**about, private=header.get("private", {}), robust=NONE)


def guard_job(job: TrainingJob, node: Node) -> Guard:
    """What the owner of the node allows; a job that is forbidden goes no further."""
    guard = guard_of(node.config, node.config.get("data"))
    guard.training(job.algorithm, job.clients)
    return guard


def own_problem(header: Header, job: TrainingJob, node: Node, guard: Guard) -> Problem:
    """The client's rows, its owner's if there are any, and the masks, which must be the server's
    wherever the client has them from."""
    masks = node.config.get("masks")
    owner = node.config if guard.data is None else {**node.config, "data": guard.data}
    for what, name in job.own_code(owner).items():
        guard.code(name, what, node.config)
    job = job.with_own_code(owner, node.number)
    guard.names(job.problem, node.config)
    masked = job.problem.get("masks") is not None
    own = str(masks) if masked and masks is not None else None
    most = guard.policy.most_parameters
    device = str(node.config.get("device", "cpu"))
    with of_the_owner():
        problem = job.client_problem(node.number, guard.data, own, most, device)
    for what, own_one in identity(problem).items():
        same = own_one == header.get(what, "")
        check(same, f"Client {node.number} has other {what} than the server.")
    if guard.policy.model_digest is not None:
        guard.policy.check_model(digest_of_loss(problem.loss, problem.words))
    return problem


def read_turn(header: Header, job: TrainingJob) -> tuple[Turn, int]:
    """The turn a letter is of, about its client alone, and the last one that was counted."""
    check(header["n"] == job.clients, f"A letter is of {header['n']} clients, not {job.clients}.")
    number, client = int(header["turn"]), torch.tensor([int(header["client"])])
    return Turn(number, job.seed, job.clients, client), int(header["counted"])


def read_broadcast(letter: Letter, algorithm: Algorithm, problem: Problem) -> Received:
    """A turn's broadcast, which unpacks to no more than the client's own model can need."""
    check(bool(letter.parts), "A letter of a turn brings no message.")
    with working_on(MAIN_MEMORY):
        came = collect([letter.parts[0]], algorithm.most_received(problem.dimension))
    return {name: placed(field, problem.device) for name, field in came.items()}


def begin_anew(
    algorithm: Algorithm, problem: Problem, turn: Turn, memory: tuple[bytes, ...] = ()
) -> State:
    """The first state, with what the server remembers of a later one."""
    first = algorithm.client_init(problem, replace(turn, number=0))
    with working_on(MAIN_MEMORY):
        kept = collect(list(memory), sum(rows.numel() for rows in first.values()))
    kept = {name: placed(field, problem.device) for name, field in kept.items()}
    for name, rows in kept.items():
        same = name in first and isinstance(rows, Tensor) and rows.shape == first[name].shape
        check(
            same and rows.dtype == first[name].dtype, f"A client has no {name!r} to be given back."
        )
    return {**first, **kept}
