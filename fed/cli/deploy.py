"""`symprune fed deploy`: a Flower deployment on this machine, from keys to the trained model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from symprune.cli import console
from symprune.errors import SympruneError
from symprune.fed.cli.promises import (
    Clip,
    Delta,
    Epsilon,
    Honest,
    Noise,
    Rate,
    read_shared_promise,
    say_promise,
)
from symprune.machine import durable
from symprune.validation import parse_assignments

if TYPE_CHECKING:
    from symprune.fed.flower.deploy import Deployment

BILL = "bill.png"
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
        str | None, typer.Option(help="logistic, softmax, linear, a network or module:function.")
    ] = None,
    split: Annotated[str, typer.Option(help="iid, class:2, dirichlet:0.5, user, ...")] = "iid",
    clients: Annotated[int, typer.Option(help="Number of nodes.")] = 2,
    rounds: Annotated[int, typer.Option(help="Communication rounds.")] = 5,
    masks: Annotated[
        Path | None, typer.Option(help="File of masks: what they prune stays zero.")
    ] = None,
    exempt: Annotated[
        list[str] | None,
        typer.Option(help="Names that are not trained or sent, as '*norm*'; repeatable."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="Any option, as sparsity=0.9; repeatable.")
    ] = None,
    l2: Annotated[float, typer.Option(help="Ridge l2/2 ||w||^2.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    robust: Annotated[
        str | None,
        typer.Option(help="Against hostile replies: norm:20 (default), krum:1, trimmed:0.2, ..."),
    ] = None,
    clip: Clip = None,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    noise: Noise = None,
    rate: Rate = 1.0,
    honest: Honest = None,
    device: Annotated[
        str, typer.Option(help="Where nodes compute: cpu, cuda, cuda:1, ...; the server: cpu.")
    ] = "cpu",
    host: Annotated[
        str, typer.Option(help="The SuperLink's name or address, as the nodes will call it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The SuperLink's port.")] = 8000,
    node_port: Annotated[int, typer.Option(help="Node i listens on this port + i.")] = 9094,
    timeout: Annotated[float, typer.Option(help="Seconds a round waits for a node.")] = 600,
    telemetry: Annotated[bool, typer.Option(help="Let Flower report usage to its makers.")] = False,
    node_keys: Annotated[
        Path | None,
        typer.Option(help="Folder of public keys, node-0.pub, ..., of nodes that run elsewhere."),
    ] = None,
    rotate_keys: Annotated[
        bool,
        typer.Option(
            "--rotate-keys", help="New keys and certificate first, for SuperLink and nodes."
        ),
    ] = False,
    rotate_authority: Annotated[
        bool,
        typer.Option(
            "--rotate-authority",
            help="A step to another certificate authority: first one ca.crt that accepts the old "
            "and the new one, for everybody; said again, the new one alone.",
        ),
    ] = False,
    only_prepare: Annotated[
        bool, typer.Option(help="Write app, keys and settings, start nothing.")
    ] = False,
) -> None:
    """Try a real deployment: SuperLink and SuperNodes with TLS and keys, on this machine."""
    from symprune.fed.devices import read_device
    from symprune.fed.flower.apps import need_flower
    from symprune.fed.problems.datasets import LOADERS
    from symprune.fed.problems.make import CODE_FREE, check_specs
    from symprune.fed.problems.models.user_code import is_code, locate_code
    from symprune.fed.remote.job import TrainingJob
    from symprune.fed.robust import DEPLOYED, NONE
    from symprune.fed.secure.keys import need_cryptography

    need_flower()
    from symprune.fed.flower.deploy import Deployment

    check_specs(data, model, split)
    read_device(device)
    if is_code(data, tuple(LOADERS)) and not own_data:
        raise SympruneError(
            f"{data} is code, and nodes take none from a server: give each its --own-data."
        )
    data, model = locate_code(data), model and locate_code(model)
    problem: dict[str, Any] = {"data": data, "model": model, "split": split, "clients": clients}
    if masks is not None:
        problem["masks"] = str(masks.resolve())
    if exempt:
        problem["exempt"] = exempt
    private = read_shared_promise(clip, epsilon, delta, noise, rate, honest, rounds, clients)
    if private:
        need_cryptography()
    job = TrainingJob(
        algorithm,
        parse_assignments(option or []),
        {**problem, "l2": l2, "seed": seed},
        rounds,
        seed,
        robust or (NONE if private else DEPLOYED),
        private,
    )
    if masks is not None or exempt:
        job.whole_problem()  # those of another model are refused before anything starts
    own: tuple[dict[str, Any], ...]
    own = tuple({"data": locate_code(each)} for each in own_data or ())
    if model is not None and is_code(model, CODE_FREE):  # here the user is every owner
        own = tuple({**each, "model": model} for each in own or ({},) * clients)
    if device != "cpu":
        own = tuple({**each, "device": device} for each in own or ({},) * clients)
    if private:  # as for pruning: the node's key vouches for it, and it knows the others'
        own = tuple({**each, "secure": True} for each in own or ({},) * clients)
    deployment = Deployment(folder, job, port, node_port, timeout, telemetry, own, host, node_keys)
    if rotate_keys:
        deployment.rotate_keys()
    if rotate_authority:
        over = deployment.rotate_authority()
        known = deployment.folder / "keys" / "ca.crt"
        console.say(
            f"The new authority has signed the SuperLink's certificate; {known} accepts it alone."
            if over
            else f"Give every owner {known}, which accepts the old and the new authority, then say "
            "--rotate-authority again."
        )
        return
    if only_prepare:
        deployment.prepare()
        console.say(f"App, keys and settings are in {deployment.folder}.")
        return
    follow(deployment, f"of {rounds} rounds")
    content = json.loads(deployment.result.read_text())
    console.out.print(_table(content))
    console.out.print(bill_table(content["bill"]))
    if private:
        say_promise(
            job.promised, delta, rounds, f"clients share it, {private['honest']} are enough"
        )
    draw_bill(content, clients, deployment.result.with_name(BILL))
    console.say(f"Model, history, {BILL} and logs are in {deployment.folder}.")
    warn_of_loss(content["history"])


def bill_table(bill: dict[str, dict[str, float]]) -> Table:
    """What communication cost, in bytes."""
    table = Table("bytes", title="The bill")
    for way in bill:
        table.add_column(way, justify="right")
    for cost in bill["up"]:
        table.add_row(cost, *(f"{costs[cost]:,.0f}" for costs in bill.values()))
    return table


def draw_bill(content: dict[str, Any], clients: int, picture: Path) -> None:
    """What an average client has sent and received by every round of a deployment."""
    from symprune.fed.compare.plots import plot_traffic

    try:
        plot_traffic(content["history"], clients, picture, content["problem"])
    except OSError as error:
        raise durable.explain(picture.parent, error) from error


def warn_of_loss(history: list[dict[str, Any]]) -> None:
    """Say that the loss ended above its start; far above, it is an error."""
    from symprune.fed.simulate import check_not_diverged, ended_above_start

    check_not_diverged(history)
    sentence = ended_above_start(history)
    if sentence is not None:
        console.warn(f"{sentence}.")


def follow(deployment: Deployment, steps: str) -> None:
    """Start it, say how far it is, and end when its result is there."""
    from symprune.fed.flower.deploy import running

    if deployment.over():
        return
    with console.display() as shown, running(deployment):
        shown.tell("Starting SuperLink and SuperNodes")
        run = deployment.submit()
        shown.tell(f"Run {run}: waiting for the first round")
        done, asked = -1, time.monotonic()
        while not deployment.finished():
            if time.monotonic() > asked + ASK:
                deployment.check_alive(run)
                asked = time.monotonic()
            if deployment.rounds_done() != done:
                done = deployment.rounds_done()
                shown.tell(f"Run {run}: {done} {steps}")
            time.sleep(LOOK)


def _table(content: dict[str, Any]) -> Table:
    history = content["history"]
    columns = [name for name in history[-1] if not name.startswith("paper")]
    table = Table(*(name.replace("_", " ") for name in columns), title=content["problem"])
    for record in history:
        values = (record[name] for name in columns)
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else f"{v:,}" for v in values))
    return table
