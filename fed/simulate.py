"""The in-process engine: all clients of a cohort are one stack, messages are counted by the byte.

With `wire=True` every message is really encoded and decoded, with `clients_at_once=1` every client
runs alone: that is the path a deployment takes, and it gives the same bits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symprune.errors import Diverged, SympruneError
from symprune.fed import snapshot as disk
from symprune.fed.problems.checks import check_problem
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Algorithm, Message, Received, State, Turn, check, check_options
from symprune.fed.randomness import check_seed
from symprune.fed.threads import limited_threads
from symprune.fed.wire.ledger import Ledger
from symprune.fed.wire.parcel import Parcel, collect, merge

Record = dict[str, Any]
START = ", start "  # before the checksum of the start point, in the name of a run
WORSE = 10  # times its loss at the start, and a run counts as diverged


@dataclass
class Result:
    """What a run leaves behind. `history` has one record per evaluation."""

    algorithm: Algorithm
    server: State
    client: State
    ledger: Ledger
    history: list[Record]
    layout: FlatLayout

    @property
    def model(self) -> Tensor:
        """The shared model, all its weights: those that masks prune are zero."""
        return self.layout.scatter(self.algorithm.model(self.server))

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The same by the names of its tensors, as `load_state_dict` wants them."""
        return self.layout.split(self.model)

    def series(self, name: str) -> list[float]:
        return [record[name] for record in self.history if name in record]

    def first(self, name: str, reaches: float, falling: bool = False) -> Record | None:
        """The first record where a metric is at least (`falling`: at most) this value."""
        for record in self.history:
            value = record.get(name, math.nan)
            if value <= reaches if falling else value >= reaches:
                return record
        return None


def ended_above_start(history: list[Record]) -> str | None:
    """A sentence without its end if the loss, of personal models where there are any, ended higher
    than it began."""
    name, first, last = _judged(history)
    if not last > first + 1e-6 * abs(first):
        return None
    since = history[0]["round"]
    return f"The {name} ended at {last:.4g}, above the {first:.4g} of round {since}"


def check_not_diverged(history: list[Record]) -> None:
    """Refuse a run that ended finite but far above its start."""
    sentence, (_, first, last) = ended_above_start(history), _judged(history)
    if sentence is not None and last > WORSE * abs(first):
        raise Diverged(sentence)


def _judged(history: list[Record]) -> tuple[str, float, float]:
    """The loss a run is judged by, at its start and at its end; NaN where nobody knows it."""
    name = "personal_loss" if "personal_loss" in history[0] else "loss"
    ends = (record.get(name, math.nan) for record in (history[0], history[-1]))
    return (name.replace("_", " "), *ends)


def simulate(
    algorithm: Algorithm,
    problem: Problem,
    rounds: int,
    *,
    seed: int = 0,
    x0: Tensor | None = None,
    masks: Mapping[str, Tensor] | None = None,
    evaluate_every: int = 1,
    optimum: Tensor | None = None,
    clients_at_once: int | None = None,
    wire: bool = False,
    checkpoint: Path | None = None,
    checkpoint_every: int = 1,
    progress: bool = False,
    threads: int = 1,
    stop: Callable[[Record], bool] | None = None,
) -> Result:
    """Run `rounds` turns and return the last states, the ledger and the history.

    seed: of everything random, the start as well unless x0 is given. x0: the model to start from.
    masks: a `MaskSet`, or names and boolean tensors; what they prune is zero from the start on, is
    not trained and not sent. evaluate_every: turns between two records of the history. optimum: x*,
    adds the objective gap and the distance to it. clients_at_once: size of the stacks that clients
    are computed in; by default the whole cohort. wire: send every message through its bytes.
    checkpoint: a file from which the run goes on if it exists, bit for bit, and to which it is
    saved. checkpoint_every: turns between two saves. progress: show a bar. threads: for torch; with
    more than one the bits may depend on the machine. stop: called with every record, ends the run
    when it returns True."""
    if rounds < 0 or evaluate_every < 1 or checkpoint_every < 1:
        raise SympruneError("Rounds and intervals must be positive.")
    if clients_at_once is not None and clients_at_once < 1:
        raise SympruneError(f"clients_at_once must be above 0, not {clients_at_once}.")
    check_seed(seed)
    check_options(algorithm)
    check_problem(problem)
    problem = problem if masks is None else problem.masked(masks)
    optimum = None if optimum is None else problem.layout.gather(optimum)
    with limited_threads(threads), _bar(progress, algorithm.name, rounds) as advance:
        algorithm = algorithm.prepare(problem.constants())
        engine = _Engine(algorithm, problem, clients_at_once, wire)
        state = _begin(algorithm, problem, seed, x0, checkpoint)
        ledger = Ledger(**state.ledger)
        goal = None if optimum is None else (optimum, problem.mean_value(optimum))

        def record() -> Record:
            numbers = _measure(algorithm, problem, state.server, state.client, goal)
            state.history.append({"round": state.turn, **numbers, **ledger.totals()})
            return state.history[-1]

        if not state.history:
            record()
        while state.turn < rounds:
            turn = Turn(state.turn, seed, problem.clients, torch.arange(problem.clients))
            state.server, state.client = engine.turn(state.server, state.client, turn, ledger)
            state.turn += 1
            last = state.turn == rounds
            if last or state.turn % evaluate_every == 0:
                entry = record()
                advance(entry)
                last = last or (stop is not None and stop(entry))
            if checkpoint is not None and (last or state.turn % checkpoint_every == 0):
                disk.save(checkpoint, state)
            if last:
                break
        return Result(algorithm, state.server, state.client, ledger, state.history, problem.layout)


def _begin(
    algorithm: Algorithm, problem: Problem, seed: int, x0: Tensor | None, checkpoint: Path | None
) -> disk.Snapshot:
    """The state a run starts from: the checkpoint's if there is one, else the algorithm's."""
    start, x0 = _start(problem, seed, x0)
    run = "" if checkpoint is None else f"{algorithm!r}, {problem.fingerprint()}, seed {seed}"
    if checkpoint is not None and checkpoint.exists():
        state = disk.load(checkpoint)
        run_before, _, start_before = state.run.partition(START)
        other = f"Checkpoint {checkpoint} belongs to another run: {state.run}."
        check(run_before == run, other)
        same_start = not start_before or start_before == start
        check(same_start, f"Checkpoint {checkpoint} began from another start point.")
        return state
    turn = Turn(0, seed, problem.clients, torch.arange(problem.clients))
    server, client = algorithm.server_init(x0, turn), algorithm.client_init(problem, turn)
    return disk.Snapshot(
        f"{run}{START}{start}", 0, server, client, Ledger.empty(problem.clients).state(), []
    )


def _start(problem: Problem, seed: int, x0: Tensor | None) -> tuple[str, Tensor]:
    """The point a run starts from, and a checksum that tells it from others."""
    x0 = problem.initial(seed) if x0 is None else problem.layout.gather(x0.to(problem.dtype))
    if x0.shape != (problem.dimension,):
        raise SympruneError(
            f"x0 has shape {tuple(x0.shape)}, the model {problem.dimension} parameters."
        )
    check(bool(torch.isfinite(x0).all()), "The start point holds NaN or infinity.")
    return f"{zlib.crc32(x0.cpu().contiguous().numpy().tobytes()):08x}", x0


@dataclass
class _Engine:
    algorithm: Algorithm
    problem: Problem
    clients_at_once: int | None
    wire: bool

    def turn(self, server: State, client: State, turn: Turn, ledger: Ledger) -> tuple[State, State]:
        """One exchange: broadcast, listen, work, reply, aggregate."""
        algorithm = self.algorithm
        cohort = algorithm.cohort(server, turn)
        others = algorithm.listeners(server, turn)
        everyone = len(cohort) == turn.n
        recipients = cohort if everyone else torch.cat([cohort, others]).unique()
        down = Parcel(
            algorithm.broadcast(server, turn.about(recipients)), len(recipients), reply=False
        )
        ledger.down(recipients, down.sizes(), down.bits())
        received = self._transport(down)
        heard = algorithm.listen(
            client if everyone else _rows(client, recipients), received, turn.about(recipients)
        )
        client = heard if everyone else _put(client, recipients, heard)
        if not everyone:
            place = torch.searchsorted(recipients, cohort)
            received = {k: _pick(v, place) for k, v in received.items()}
        client, replies = self._work(client, received, turn, cohort, everyone)
        up = Parcel(replies, len(cohort), reply=True)
        up.check_finite(f"{algorithm.name}: a reply of round {turn.number}")
        ledger.up(cohort, up.sizes(), up.bits())
        server = algorithm.server_step(server, self._transport(up), turn.about(cohort))
        if not bool(torch.isfinite(algorithm.model(server)).all()):
            raise Diverged(
                f"{algorithm.name} diverged in round {turn.number}: its model is no longer finite"
            )
        return server, client

    def _work(
        self, client: State, received: Received, turn: Turn, cohort: Tensor, everyone: bool
    ) -> tuple[State, Message]:
        """The cohort's client steps, all at once or in chunks."""
        size = self.clients_at_once or len(cohort)
        if everyone and size >= len(cohort):
            return self.algorithm.client_step(client, received, self.problem, turn)
        client, messages = dict(client), []
        for begin in range(0, len(cohort), size):
            part = slice(begin, begin + size)
            who = cohort[part]
            state, message = self.algorithm.client_step(
                _rows(client, who),
                {k: v[part] for k, v in received.items()},
                self.problem.select(who),
                turn.about(who),
            )
            client = _put(client, who, state)
            messages.append(message)
        return client, merge(messages)

    def _transport(self, parcel: Parcel) -> Received:
        if not self.wire:
            return parcel.received()
        return collect([parcel.encode(row) for row in range(parcel.count)])


def _rows(state: State, clients: Tensor) -> State:
    return {name: tensor[clients] for name, tensor in state.items()}


def _put(state: State, clients: Tensor, rows: State) -> State:
    if rows.keys() != state.keys():
        raise SympruneError(f"A client's state changed its fields: {sorted(rows)}.")
    return {name: tensor.index_copy(0, clients, rows[name]) for name, tensor in state.items()}


def _pick(rows: Tensor | list[Tensor], place: Tensor) -> Tensor | list[Tensor]:
    return [rows[i] for i in place.tolist()] if isinstance(rows, list) else rows[place]


def _measure(
    algorithm: Algorithm,
    problem: Problem,
    server: State,
    client: State,
    goal: tuple[Tensor, float] | None,
) -> Record:
    x = algorithm.model(server)
    out: Record = {"loss": problem.mean_value(x)}
    if not math.isfinite(out["loss"]):
        raise Diverged(f"{algorithm.name} diverged: its loss is no longer finite")
    out["gradient_norm"] = float(problem.mean_gradient(x).norm())
    if goal is not None:
        out["gap"] = out["loss"] - goal[1]
        out["distance"] = float((x - goal[0]).norm())
    out.update(problem.evaluate(x))
    personal = algorithm.personal_models(server, client, problem)
    if personal is not None:
        out["personal_loss"] = float(problem.value(personal).double().mean())
        out.update(problem.evaluate_personal(personal))
    out.update(algorithm.metrics(server, client))
    return out


@contextmanager
def _bar(show: bool, name: str, rounds: int) -> Iterator[Callable[[Record], None]]:
    if not show:
        yield lambda record: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    name_column, now_column = (
        TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[now]}")
    )
    columns = (name_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), now_column)
    with Progress(*columns) as progress:
        task = progress.add_task(name, total=rounds, now="")

        def advance(record: Record) -> None:
            shown = next((m for m in ("accuracy", "r2") if m in record), "loss")
            now = f"{shown} {record[shown]:.4f}"
            progress.update(task, completed=record["round"], now=now)

        yield advance
