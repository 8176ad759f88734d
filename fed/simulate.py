"""The in-process engine: all clients of a cohort are one stack, messages are counted by the byte.

With `wire=True` every message is really encoded and decoded, with `clients_at_once=1` every client
runs alone: that is the path a deployment takes, and it gives the same bits.
"""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from symprune.errors import Diverged, SympruneError
from symprune.fed import snapshot as disk
from symprune.fed.devices import MAIN_MEMORY, placed, working_on
from symprune.fed.problems.checks import check_problem
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Algorithm, Message, Received, State, Turn, check, check_options
from symprune.fed.randomness import check_seed
from symprune.fed.robust import NONE, Defence, Usual, defend, read_defence
from symprune.fed.threads import limited_threads
from symprune.fed.wire.ledger import Ledger
from symprune.fed.wire.parcel import Parcel, collect, merge

Record = dict[str, Any]
START = ", start "  # before the checksum of the start point, in the name of a run
TIMED, PATIENCE = 3, 2.0  # turns, or seconds, after which the pace of a run is known
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
        with working_on(next(iter(self.server.values())).device):
            return self.layout.scatter(self.algorithm.model(self.server))

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The same by the names of its tensors, as `load_state_dict` wants them."""
        return self.layout.split(self.model)

    def series(self, name: str) -> list[float]:
        """A metric at every evaluation that has it."""
        found = [record[name] for record in self.history if name in record]
        known = ", ".join(self.history[-1])
        check(bool(found), f"The run has no metric {name!r}; it has {known}.")
        return found

    def first(self, name: str, reaches: float, falling: bool = False) -> Record | None:
        """The first record where a metric is at least (`falling`: at most) this value."""
        for record in self.history:
            value = record.get(name, math.nan)
            if value <= reaches if falling else value >= reaches:
                return record
        return None


def ended_above_start(history: list[Record]) -> str | None:
    """A sentence without its end if the loss, of personal models where there are any, ended higher
    than it began. Where owners keep their losses, the perplexity of the test text stands for it."""
    name, first, last = _judged(history)
    if not last > first + 1e-6 * abs(first):
        return None
    since = history[0]["round"]
    return f"The {name} ended at {last:.4g}, above the {first:.4g} of round {since}"


def check_not_diverged(history: list[Record]) -> None:
    """Refuse a run that ended finite but far above its start."""
    sentence, (name, first, last) = ended_above_start(history), _judged(history)
    if name == "perplexity":  # its logarithm is a loss
        first, last = (math.log(max(value, 1)) for value in (first, last))
    if sentence is not None and last > WORSE * abs(first):
        raise Diverged(sentence)


def _judged(history: list[Record]) -> tuple[str, float, float]:
    """The loss a run is judged by, at its start and at its end; NaN where nobody knows it."""
    names = ("personal_loss", "loss", "perplexity")
    name = next((name for name in names if name in history[0]), "loss")
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
    gradient_norm: bool | None = None,
    optimum: Tensor | None = None,
    clients_at_once: int | None = None,
    wire: bool = False,
    robust: str = NONE,
    checkpoint: Path | None = None,
    checkpoint_every: int = 1,
    progress: Callable[[Record], None] = lambda record: None,
    threads: int = 1,
    stop: Callable[[Record], bool] | None = None,
    foresee: Callable[[Pace], bool] | None = None,
) -> Result:
    """Run `rounds` turns and return the last states, the ledger and the history.

    seed: of everything random, the start as well unless x0 is given. x0: the model to start from.
    masks: a `MaskSet`, or names and boolean tensors; what they prune is zero from the start on, is
    not trained and not sent. evaluate_every: turns between two records of the history; with 0
    nothing is evaluated, and the records of the first and the last turn count bytes alone.
    gradient_norm: whether records have `||grad f||`, which for a network costs as much as training
    on all rows; by default they have it where the gradient is a short formula. optimum: x*, adds
    the objective gap and the distance to it. clients_at_once: size of the stacks that clients are
    computed in; by default the whole cohort. wire: send every message through its bytes. robust: a
    defence against hostile replies, see `robust.py`.
    checkpoint: a file from which the run goes on if it exists, bit for bit, and to which it is
    saved. checkpoint_every: turns between two saves. progress: called with every record. threads:
    for torch; with more than one the bits may depend on the machine. stop: called with every
    record, ends the run when it returns True. foresee: told once, behind the first turns, how fast
    the run is; it ends there, without a last record, when that returns False."""
    if rounds < 0 or evaluate_every < 0:
        raise SympruneError("Rounds and evaluate_every must not be negative.")
    if checkpoint_every < 1:
        raise SympruneError(f"checkpoint_every must be above 0, not {checkpoint_every}.")
    if clients_at_once is not None and clients_at_once < 1:
        raise SympruneError(f"clients_at_once must be above 0, not {clients_at_once}.")
    check_seed(seed)
    check_options(algorithm)
    check_problem(problem)
    problem = problem if masks is None else problem.masked(masks)
    if optimum is not None:
        optimum = problem.layout.gather(optimum.to(problem.device, problem.dtype))
    with (
        limited_threads(threads),
        working_on(problem.device),
    ):
        algorithm = algorithm.prepare(problem.constants())
        defence = read_defence(robust)
        defence.check_for(algorithm)
        engine = _Engine(algorithm, problem, clients_at_once, wire, defence)
        state = _begin(algorithm, problem, seed, x0, checkpoint)
        engine.usual = state.usual
        ledger = Ledger(**state.ledger)
        goal = None if optimum is None else (optimum, problem.mean_value(optimum))
        with_norm = problem.closed_form if gradient_norm is None else gradient_norm

        def record() -> Record:
            numbers = (
                _measure(algorithm, problem, state.server, state.client, goal, with_norm)
                if evaluate_every
                else {}
            )
            state.history.append({"round": state.turn, **numbers, **ledger.totals()})
            return state.history[-1]

        stopwatch = _Stopwatch()
        if not state.history:
            stopwatch.of_evaluation(record)
        elif foresee is not None and evaluate_every:  # a run that goes on has its start already
            stopwatch.of_evaluation(
                lambda: _measure(algorithm, problem, state.server, state.client, goal, with_norm)
            )
        while state.turn < rounds:
            turn = Turn(state.turn, seed, problem.clients, torch.arange(problem.clients))
            with stopwatch.turn():
                state.server, state.client = engine.turn(state.server, state.client, turn, ledger)
            state.turn += 1
            last = state.turn == rounds
            if foresee is not None and (last or stopwatch.knows):
                left = rounds - state.turn
                evaluations = int(left // (evaluate_every or math.inf))
                if not foresee(stopwatch.pace(left, evaluations)):
                    break
                foresee = None
            if last or (evaluate_every and state.turn % evaluate_every == 0):
                entry = record()
                progress(entry)
                last = (stop is not None and stop(entry)) or last
            if checkpoint is not None and (last or state.turn % checkpoint_every == 0):
                disk.save(checkpoint, replace(state, usual=engine.usual))
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
        state = disk.load(checkpoint, problem.device)
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
    x0 = (
        problem.initial(seed)
        if x0 is None
        else problem.layout.gather(x0.to(problem.device, problem.dtype))
    )
    if x0.shape != (problem.dimension,):
        raise SympruneError(
            f"x0 has shape {tuple(x0.shape)}, the model {problem.dimension} parameters."
        )
    check(bool(torch.isfinite(x0).all()), "The start point holds NaN or infinity.")
    return f"{zlib.crc32(x0.cpu().contiguous().numpy().tobytes()):08x}", x0


@dataclass(frozen=True)
class Pace:
    """Seconds that a turn takes and an evaluation, and how many of each are left."""

    turn: float
    evaluation: float
    turns: int
    evaluations: int

    @property
    def left(self) -> float:
        return self.turn * self.turns + self.evaluation * self.evaluations


class _Stopwatch:
    """Times the first turns, of which the first of all sets things up: the median of a few, or of
    as many as there is patience for."""

    def __init__(self) -> None:
        self.turns: list[float] = []
        self.evaluation = 0.0

    @property
    def knows(self) -> bool:
        return len(self.turns) == TIMED or sum(self.turns) > PATIENCE

    def of_evaluation(self, work: Callable[[], object]) -> None:
        begun = time.perf_counter()
        work()
        self.evaluation = time.perf_counter() - begun

    @contextmanager
    def turn(self) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.turns.append(time.perf_counter() - begun)

    def pace(self, turns: int, evaluations: int) -> Pace:
        return Pace(statistics.median(self.turns), self.evaluation, turns, evaluations)


@dataclass
class _Engine:
    algorithm: Algorithm
    problem: Problem
    clients_at_once: int | None
    wire: bool
    defence: Defence
    usual: Usual = field(default_factory=dict)  # how far replies were so far
    stacks: dict[int, Problem] = field(default_factory=dict)
    own: State = field(default_factory=dict)  # clients' states that only the engine holds

    def turn(self, server: State, client: State, turn: Turn, ledger: Ledger) -> tuple[State, State]:
        """One exchange: broadcast, listen, work, reply, aggregate."""
        algorithm = self.algorithm
        cohort = algorithm.cohort(server, turn)
        others = algorithm.listeners(server, turn)
        everyone = len(cohort) == turn.n
        if everyone:  # the algorithm is given the states themselves, and may keep them
            self.own = {}
        recipients = cohort if everyone else torch.cat([cohort, others]).unique()
        down = Parcel(
            algorithm.broadcast(server, turn.about(recipients)), len(recipients), reply=False
        )
        ledger.down(recipients.cpu(), down.sizes(), down.bits())
        received = self._transport(down)
        heard = algorithm.listen(
            client if everyone else _rows(client, recipients), received, turn.about(recipients)
        )
        client = heard if everyone else self._put(client, recipients, heard)
        if not everyone:
            place = torch.searchsorted(recipients, cohort)
            received = {k: _pick(v, place) for k, v in received.items()}
        heard = client if everyone else _rows(client, cohort)
        client, replies = self._work(client, received, turn, cohort, everyone)
        up = Parcel(replies, len(cohort), reply=True)
        up.check_finite(f"{algorithm.name}: a reply of round {turn.number}")
        came, about = self._transport(up), turn.about(cohort)
        kept, seen, about = defend(self.defence, algorithm, came, about, self.usual)
        counted = kept.cpu()
        ledger.up(about.clients.cpu(), up.sizes()[counted], up.bits()[counted])
        if not bool(kept.all()):  # work that does not count is undone, as between machines
            client = self._put(client, cohort[~kept], _rows(heard, ~kept))
        server = algorithm.server_step(server, seen, about)
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
        states, messages = [], []
        for begin in range(0, len(cohort), size):
            part = slice(begin, begin + size)
            place: Tensor | slice = part if everyone else cohort[part]
            state, message = self.algorithm.client_step(
                _rows(client, place),
                {k: v[part] for k, v in received.items()},
                self._stack(part) if everyone else self.problem.select(place),
                turn.about(cohort[part]),
            )
            states.append(state)
            messages.append(message)
        worked = {name: torch.cat([state[name] for state in states]) for name in states[0]}
        return worked if everyone else self._put(client, cohort, worked), merge(messages)

    def _put(self, client: State, clients: Tensor, rows: State) -> State:
        """All states with the rows of some clients replaced, in place where nobody else can hold
        the tensor: few clients at work among many must not cost a copy of all."""
        if rows.keys() != client.keys():
            raise SympruneError(f"A client's state changed its fields: {sorted(rows)}.")
        for name, tensor in client.items():
            if self.own.get(name) is not tensor:
                self.own[name] = tensor.clone()
            self.own[name][clients] = rows[name]
        return dict(self.own)

    def _stack(self, part: slice) -> Problem:
        """The problem of some clients side by side, made once: its rows are not copied."""
        if part.start not in self.stacks:
            self.stacks[part.start] = self.problem.select(part)
        return self.stacks[part.start]

    def _transport(self, parcel: Parcel) -> Received:
        if not self.wire:
            return parcel.received()
        with working_on(MAIN_MEMORY):
            seen = collect([parcel.encode(row) for row in range(parcel.count)])
        return {name: placed(field, self.problem.device) for name, field in seen.items()}


def _rows(state: State, clients: Tensor | slice) -> State:
    return {name: tensor[clients] for name, tensor in state.items()}


def _pick(rows: Tensor | list[Tensor], place: Tensor) -> Tensor | list[Tensor]:
    return [rows[i] for i in place.tolist()] if isinstance(rows, list) else rows[place]


def _measure(
    algorithm: Algorithm,
    problem: Problem,
    server: State,
    client: State,
    goal: tuple[Tensor, float] | None,
    gradient_norm: bool,
) -> Record:
    x = algorithm.model(server)
    out: Record = {"loss": problem.mean_value(x)}
    if not math.isfinite(out["loss"]):
        raise Diverged(f"{algorithm.name} diverged: its loss is no longer finite")
    if gradient_norm:
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
