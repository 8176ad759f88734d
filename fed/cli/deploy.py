"""`symprune fed deploy`: a Flower deployment on this machine, from keys to the trained model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from symprune.cli import console
from symprune.validation import parse_assignments

if TYPE_CHECKING:
    from symprune.fed.flower.deploy import Deployment

LOOK = 1.0  # seconds between two looks at the server's folder
ASK = 60.0  # seconds between two questions to Flower, each a process, whether the run still runs


def deploy(
    algorithm: Annotated[str, typer.Option(help="Name, see `symprune fed list`.")],
    folder: Annotated[Path, typer.Option(help="Everything lives here; used again, it goes on.")],
    data: Annotated[str, typer.Option(help="Data set, shared out among the nodes.")] = "digits",
    own_data: Annotated[
        list[str] | None, typer.Option(help="Own data of node 0, 1, ...; repeatable.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="logistic, softmax, linear or a network.")
    ] = None,
    split: Annotated[str, typer.Option(help="iid, class:2, dirichlet:0.5, user, ...")] = "iid",
    clients: Annotated[int, typer.Option(help="Number of nodes.")] = 2,
    rounds: Annotated[int, typer.Option(help="Communication rounds.")] = 5,
    masks: Annotated[
        Path | None, typer.Option(help="File of masks: what they prune stays zero.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="Any option, as sparsity=0.9; repeatable.")
    ] = None,
    l2: Annotated[float, typer.Option(help="Ridge l2/2 ||w||^2.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    host: Annotated[
        str, typer.Option(help="The SuperLink's name or address, as the nodes will call it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The SuperLink's port.")] = 8000,
    node_port: Annotated[int, typer.Option(help="Node i listens on this port + i.")] = 9094,
    timeout: Annotated[float, typer.Option(help="Seconds a round waits for a node.")] = 600,
    telemetry: Annotated[bool, typer.Option(help="Let Flower report usage to its makers.")] = False,
    only_prepare: Annotated[
        bool, typer.Option(help="Write app, keys and settings, start nothing.")
    ] = False,
) -> None:
    """Try a real deployment: SuperLink and SuperNodes with TLS and keys, on this machine."""
    from symprune.fed.flower.apps import need_flower
    from symprune.fed.problems.make import check_specs
    from symprune.fed.remote.job import TrainingJob

    need_flower()
    from symprune.fed.flower.deploy import Deployment

    check_specs(data, model, split)
    problem: dict[str, Any] = {"data": data, "model": model, "split": split, "clients": clients}
    if masks is not None:
        problem["masks"] = str(masks.resolve())
    job = TrainingJob(
        algorithm,
        parse_assignments(option or []),
        {**problem, "l2": l2, "seed": seed},
        rounds,
        seed,
    )
    if masks is not None:
        job.whole_problem()  # masks of another model are refused before anything starts
    own = tuple({"data": each} for each in own_data or ())
    deployment = Deployment(folder, job, port, node_port, timeout, telemetry, own, host)
    if only_prepare:
        deployment.prepare()
        console.say(f"App, keys and settings are in {deployment.folder}.")
        return
    follow(deployment, f"of {rounds} rounds")
    content = json.loads(deployment.result.read_text())
    console.out.print(_table(content))
    console.out.print(bill_table(content["bill"]))
    console.say(f"Model, history and logs are in {deployment.folder}.")
    warn_of_loss(content["history"])


def bill_table(bill: dict[str, dict[str, float]]) -> Table:
    """What communication cost, in bytes."""
    table = Table("bytes", *bill["up"], title="The bill")
    for way, costs in bill.items():
        table.add_row(way, *(f"{value:,.0f}" for value in costs.values()))
    return table


def warn_of_loss(history: list[dict[str, Any]]) -> None:
    """Say that the loss ended above its start; far above, it is an error."""
    from symprune.fed.simulate import check_not_diverged, ended_above_start

    check_not_diverged(history)
    sentence = ended_above_start(history)
    if sentence is not None:
        console.err.print(f"Warning: {sentence}.")


def follow(deployment: Deployment, steps: str) -> None:
    """Start it, say how far it is, and end when its result is there."""
    from symprune.fed.flower.deploy import running

    if deployment.over():
        return
    with console.out.status("Starting SuperLink and SuperNodes") as status, running(deployment):
        run = deployment.submit()
        status.update(f"Run {run}: waiting for the first round")
        done, asked = -1, time.monotonic()
        while not deployment.finished():
            if time.monotonic() > asked + ASK:
                deployment.check_alive(run)
                asked = time.monotonic()
            if deployment.rounds_done() != done:
                done = deployment.rounds_done()
                status.update(f"Run {run}: {done} {steps}")
            time.sleep(LOOK)


def _table(content: dict[str, Any]) -> Table:
    history = content["history"]
    columns = [name for name in history[-1] if not name.startswith("paper")]
    table = Table(*(name.replace("_", " ") for name in columns), title=content["problem"])
    for record in history:
        values = (record[name] for name in columns)
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else f"{v:,}" for v in values))
    return table
