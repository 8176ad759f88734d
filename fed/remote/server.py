"""The server of a federation whose clients are other machines: a plain loop over the rounds.

It goes on with whoever replies, counts only replies that pass, repeats a broadcast to a client that
missed it, gives a client that lost its disk its state back, and saves itself after every round.
With everyone there it makes the same bits as `simulate`.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from pathlib import Path
from typing import Any

from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import check
from symprune.fed.remote.job import STATE, TrainingJob, identity, job_from_json
from symprune.fed.remote.loop import PATIENCE, Loop, Outcome, write_about
from symprune.fed.remote.metrics import write_metrics
from symprune.fed.remote.private_loop import PrivateLoop
from symprune.fed.remote.replies import HEADER_BYTES
from symprune.fed.remote.transport import Transport, wait_for_all
from symprune.fed.robust import NONE
from symprune.fed.simulate import Record
from symprune.fed.threads import limited_threads
from symprune.fed.wire.envelope import unpack
from symprune.machine import durable
from symprune.machine.patience import stretched
from symprune.validation import parse_json

log = logging.getLogger("symprune.fed")
FAR = 100.0  # times the median client's smoothness
MOST_ROWS = 1 << 48
LARGEST = 1e300  # that a float has and whose use is finite


def serve(job: TrainingJob, transport: Transport, folder: Path, *, pause: float = 3.0) -> Outcome:
    """Run the job to its last round, from where the folder's checkpoint stands. `pause` seconds
    pass before a round without the replies it needs is tried again."""
    check(job.clients == transport.clients, f"The job is for {job.clients} clients.")
    with limited_threads():
        problem = job.whole_problem()
        wait_for_all(transport, PATIENCE, pause)
        run, ready, own = _start(job, problem, transport, folder, pause)
        kind = PrivateLoop if job.private else Loop
        loop = kind(run, ready, problem, transport, pause)
        loop.begin(folder / STATE)
        if not loop.history:  # the start, by which the end is judged
            loop.measure(own)
        while loop.turn < job.rounds:
            loop.one_round()
            record = loop.measure(own)
            loop.save(folder / STATE)
            write_metrics(folder, record, run)
            log.info("Round %s of %s: %s", loop.turn, job.rounds, _line(record))
        return loop.outcome()


def _start(
    job: TrainingJob, problem: Problem, transport: Transport, folder: Path, pause: float
) -> tuple[str, TrainingJob, bool]:
    """The run's name, the job with all hyper-parameters, and whether clients hold own data: from
    the folder if it has them, else from what the clients say about themselves."""
    file = folder / "run.json"
    if file.exists():
        content = parse_json(file.read_text())
        wanted = {**json.loads(job.to_json()), "rounds": None}
        same = {**content["asked"], "rounds": None} == wanted
        check(same, f"{folder} holds another run: {content['asked']['algorithm']}.")
        held = identity(problem)
        for what in held:
            same = content.get(what, "") == held[what]
            check(same, f"{folder} holds a run with other {what}.")
        return content["run"], job_from_json(json.dumps(content["ready"])), content["own"]
    constants, own = _gather(job, problem, transport, pause)
    algorithm = job.build_algorithm().prepare(constants)
    algorithm.check_across_machines()
    run, ready = uuid.uuid4().hex[:12], job.with_prepared(algorithm)
    folder.mkdir(parents=True, exist_ok=True)
    content = {"run": run, "own": own, **identity(problem)}
    content |= {"asked": json.loads(job.to_json()), "ready": json.loads(ready.to_json())}
    durable.write_text(file, json.dumps(content, indent=1))
    return run, ready, own


def _gather(
    job: TrainingJob, problem: Problem, transport: Transport, pause: float
) -> tuple[Constants, bool]:
    """Ask every client for what the step sizes need. If nobody has data of its own the server can
    compute the same, and the smoothness of the mean as well, from the data set they share."""
    told: dict[int, dict[str, Any]] = {}
    for attempt in range(PATIENCE):
        missing = [i for i in range(job.clients) if i not in told]
        asked = {"kind": "describe", **identity(problem)}
        letters = {i: write_about(job, i, asked) for i in missing}
        for client, data in transport.exchange(letters).items():
            try:
                told[client] = _read_description(unpack(data, HEADER_BYTES).header, client, problem)
            except Exception as error:  # whatever a stranger's bytes can provoke
                log.warning("Client %s cannot start: %s", client, error)
        if len(told) == job.clients:
            break
        log.info("%s of %s clients are here.", len(told), job.clients)
        if attempt + 1 < PATIENCE:
            time.sleep(stretched(pause))
    absent = [str(i) for i in range(job.clients) if i not in told]
    check(not absent, f"Clients {', '.join(absent)} did not say what they hold.")
    if not any(item["own"] for item in told.values()):
        return problem.constants(), False
    rows = [told[i] for i in range(job.clients)]
    if job.defence.rule != NONE:
        _bound_constants(rows, problem.l2)
    L, mu, sizes = (tuple(row[k] for row in rows) for k in ("L", "mu", "rows"))
    return Constants(L, mu, sizes, problem.layout), True


def _bound_constants(told: list[dict[str, Any]], l2: float) -> None:
    """Put what a client says of its smoothness and convexity back within what is usual, with a
    warning: one that says 1e30, or a convexity of nothing, would leave every step at zero. Of two
    clients that differ nobody can say which is odd."""
    known = sorted(row["L"] for row in told if math.isfinite(row["L"]))
    most = FAR * known[(len(known) - 1) // 2] if len(known) > 2 else math.inf
    for client, row in enumerate(told):
        for name, least, largest in (("L", l2, most), ("mu", l2, row["L"])):
            said = row[name]
            if math.isnan(said) or math.isnan(largest) or least <= said <= largest:
                continue
            row[name] = min(max(said, least), max(largest, least))
            log.warning("Client %s says its %s is %g; %g is used.", client, name, said, row[name])


def _read_description(header: dict[str, Any], client: int, problem: Problem) -> dict[str, Any]:
    """A client's own words, checked."""
    check(header.get("status") != "error", str(header.get("reason"))[:500])
    rows, own, d = header.get("rows"), header.get("own"), header.get("dimension")
    whole = type(rows) is int and 0 < rows <= MOST_ROWS
    check(whole, f"Client {client} says it has {str(rows)[:30]} rows.")
    has = f"Client {client} has a model of {str(d)[:30]} parameters"
    sentence = f"{has}, the server {problem.dimension}."
    check(d == problem.dimension and isinstance(own, bool), sentence)
    numbers = {}
    for name in ("L", "mu"):
        value = math.nan if header.get(name) is None else header[name]
        number = type(value) in (int, float) and (value != value or 0 <= value <= LARGEST)
        check(number, f"Client {client} says its {name} is {str(value)[:30]}.")
        numbers[name] = float(value)
    return {"rows": rows, "own": own, **numbers}


def _line(record: Record) -> str:
    shown = ("loss", "accuracy", "r2", "replies", "bytes_up")
    return ", ".join(
        f"{name} {record[name]:.4g}"
        if isinstance(record[name], float)
        else f"{name} {record[name]}"
        for name in shown
        if name in record
    )
