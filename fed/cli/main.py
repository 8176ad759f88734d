"""`symprune fed`: run one algorithm, list, compare, deploy them. No logic of its own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from symprune.cli import console
from symprune.cli import options as o
from symprune.cli.screen.help import App
from symprune.cli.showing import Foreseen, show_forecast
from symprune.errors import SympruneError
from symprune.fed.cli import policy
from symprune.fed.cli.deploy import BILL, bill_table, deploy, warn_of_loss
from symprune.fed.cli.merge import merge
from symprune.fed.cli.node_key import node_key
from symprune.fed.cli.promises import (
    Clip,
    Delta,
    Epsilon,
    Honest,
    Noise,
    Rate,
    read_promise,
    say_promise,
)
from symprune.fed.cli.prune import prune
from symprune.machine import durable
from symprune.validation import check_positive, parse_assignments

if TYPE_CHECKING:  # torch is imported by what a command does, not by its help
    from symprune.fed.compare.runs import Line
    from symprune.fed.problems.problem import Problem
    from symprune.fed.simulate import Pace, Record, Result

Device = Annotated[str, typer.Option(help="Where it runs: cpu, cuda, cuda:1, ...")]
MEASURED = "What is measured"
HISTORY, MODEL = "history.json", "model.safetensors"

app = App(
    help="Federated sparse training, and pruning with text that stays where it is.",
    no_args_is_help=True,
)
app.add_typer(policy.app, name="policy")
app.command()(prune)
app.command()(deploy)
app.command("node-key")(node_key)
app.command()(merge)


@app.command()
def run(
    algorithm: Annotated[str, typer.Option(help="Name, see `symprune fed list`.")],
    data: Annotated[
        str, typer.Option(help="Data set: name, name:path or module:function.")
    ] = "digits",
    model: Annotated[
        str | None, typer.Option(help="logistic, softmax, linear, a network or module:function.")
    ] = None,
    split: Annotated[str, typer.Option(help="iid, class:2, dirichlet:0.5, user, ...")] = "iid",
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 10,
    rounds: Annotated[int, typer.Option(help="Communication rounds.")] = 100,
    sparsity: Annotated[float | None, typer.Option(help="Share of weights removed.")] = None,
    compressor: Annotated[str | None, typer.Option(help="top-k:0.05, comp:1,15, ...")] = None,
    mask_score: Annotated[
        str | None, typer.Option(help="What picks a client's mask: ria, wanda, symwanda, ...")
    ] = None,
    masks: Annotated[
        Path | None, typer.Option(help="File of masks: what they prune stays zero.")
    ] = None,
    exempt: Annotated[
        list[str] | None,
        typer.Option(help="Names that are not trained or sent, as '*norm*'; repeatable."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", help="Any other option, as gamma=0.1; repeatable.")
    ] = None,
    l2: Annotated[float, typer.Option(help="Ridge l2/2 ||w||^2.")] = 1e-3,
    weighting: Annotated[str, typer.Option(help="A client's rows: mean, size or sum.")] = "mean",
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    client_test_share: Annotated[
        float, typer.Option(help="Rows kept for clients' own tests.", rich_help_panel=MEASURED)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            help="Rounds between evaluations, 0: none; a hundredth of all.",
            rich_help_panel=MEASURED,
        ),
    ] = None,
    gradient_norm: Annotated[
        bool | None,
        typer.Option(
            help="Measure the gradient's norm; for linear models.", rich_help_panel=MEASURED
        ),
    ] = None,
    clients_at_once: Annotated[
        int | None, typer.Option(help="Size of the stacks clients are computed in.")
    ] = None,
    robust: Annotated[
        str, typer.Option(help="Against hostile replies: norm:20, krum:1, trimmed:0.2, ...")
    ] = "none",
    clip: Clip = None,
    epsilon: Epsilon = None,
    delta: Delta = 1e-5,
    noise: Noise = None,
    rate: Rate = 1.0,
    honest: Honest = None,
    device: Device = "cpu",
    gap: Annotated[
        bool,
        typer.Option(
            "--gap", help="Also solve centrally and report the gap.", rich_help_panel=MEASURED
        ),
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="File to save to and resume from.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for history and model.")] = None,
    report_to: o.ReportTo = None,
    dry_run: o.DryRun = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Run one algorithm on one federated problem."""
    from symprune.criteria import allow_code
    from symprune.fed.algorithms import choose
    from symprune.fed.cli.forecast import forecast_run
    from symprune.fed.devices import read_device
    from symprune.fed.problems.make import make_problem
    from symprune.fed.problems.models.user_code import allow_code as allow_own_code
    from symprune.fed.simulate import simulate
    from symprune.machine import memory
    from symprune.tracking.figures import add_round
    from symprune.tracking.tracker import choose as choose_loggers
    from symprune.tracking.tracker import tracked

    allow_own_code(data, model)
    check_positive(rounds=rounds)
    loggers = choose_loggers(report_to or [])
    place = read_device(device)
    options = parse_assignments(option or [])
    if sparsity is not None:
        options["sparsity"] = sparsity
    if compressor is not None:
        options["compressor"] = compressor
    if mask_score is not None:
        allow_code(mask_score)
        options["mask_score"] = mask_score
    chosen = choose(algorithm, **options)
    promised = read_promise(clip, epsilon, delta, noise, rate, honest, rounds)
    if promised is not None:
        from symprune.fed.private_users import private_users

        chosen = private_users(chosen, promised)
    if output is not None and not dry_run:
        _make(output, HISTORY, MODEL, BILL)
    begun, held = time.perf_counter(), memory.now()
    problem = make_problem(
        data,
        model,
        split,
        clients=clients,
        l2=l2,
        weighting=weighting,
        dtype=dtype,
        seed=seed,
        client_test_share=client_test_share,
        masks=masks,
        exempt=exempt or (),
    )
    name = output.name if output else chosen.name
    settings = {"algorithm": repr(chosen), "problem": problem.name, "rounds": rounds, "seed": seed}
    placed = problem.to(place)
    told: list[Record] = []
    foreseen = Foreseen(console.remark, dry_run)

    def foresee(pace: Pace) -> bool:
        spent = time.perf_counter() - begun
        return foreseen.go_on(forecast_run(chosen, placed, rounds, pace, held, spent, output))

    with (
        tracked(
            [] if dry_run else loggers, name, settings, console.remark, console.warn
        ) as tracker,
        console.display(not quiet) as shown,
    ):
        shown.tell(f"{chosen.name} on {problem.name}")
        foreseen.tell = shown.tell

        def progress(record: Record) -> None:
            shown.count("rounds", record["round"], rounds, _now(record))
            add_round(tracker, record)
            told.append(record)

        result = simulate(
            chosen,
            placed,
            rounds,
            seed=seed,
            evaluate_every=max(1, rounds // 100) if evaluate_every is None else evaluate_every,
            gradient_norm=gradient_norm,
            optimum=_optimum(problem) if gap else None,
            clients_at_once=clients_at_once,
            robust=robust,
            checkpoint=checkpoint,
            checkpoint_every=rounds if dry_run else 1,
            progress=progress,
            foresee=foresee,
        )
        for record in result.history[: -len(told) or None]:  # the start, and of an earlier attempt
            add_round(tracker, record)
    if dry_run:
        show_forecast(foreseen.found, None)
        return
    bill = result.ledger.bill(result.history[-1]["round"])
    console.out.print(_result_table(result, problem))
    console.out.print(bill_table(bill))
    if promised is not None:
        who = "the server adds it" if honest is None else "clients share it"
        say_promise(promised, delta, result.history[-1]["round"], who)
    if output is not None:
        with _writing(output):
            _write(output, result, problem, bill)
        console.say(f"History, model and {BILL} are in {output}.")
    warn_of_loss(result.history)


@app.command("list")
def list_algorithms(
    everything: Annotated[
        bool, typer.Option("--all", help="Also papers, what is sent, and every option.")
    ] = False,
) -> None:
    """All algorithms and what they do; with --all what they send, and their options."""
    from symprune.fed.algorithms import ALGORITHMS, options_of

    found = sorted(ALGORITHMS.items())
    if everything:
        table = Table("algorithm", "what it does", "from", "sends", "options")
        for name, kind in found:
            table.add_row(name, _about(kind), kind.paper, kind.sends, ", ".join(options_of(kind)))
        console.out.print(table)
        return
    table = Table("family", "algorithms")
    families: dict[str, list[str]] = {}
    for name, kind in found:
        family = sys.modules[kind.__module__.rpartition(".")[0]]
        families.setdefault((family.__doc__ or "").strip(), []).append(name)
    for about, names in families.items():
        table.add_row(about, ", ".join(names))
    console.out.print(table)
    console.say(
        f"{len(found)} algorithms; --all shows what each does, its paper, what it sends and its "
        "options."
    )


def _about(kind: type) -> str:
    """The first paragraph of what an algorithm says of itself."""
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="YAML: problem, rounds, algorithms, ...")],
    output: Annotated[Path, typer.Option(help="Folder for table, histories and plot.")] = Path(
        "out/compare"
    ),
    device: Device = "cpu",
    report_to: o.ReportTo = None,
    dry_run: o.DryRun = False,
) -> None:
    """Several algorithms on one problem: a table and a plot of accuracy against bytes."""
    from symprune.fed.cli.forecast import forecast_comparison
    from symprune.fed.compare.plan import read_plan
    from symprune.fed.compare.runs import Setting, run_entry, summary
    from symprune.fed.devices import read_device
    from symprune.fed.problems.make import make_problem
    from symprune.fed.simulate import ended_above_start
    from symprune.tracking.figures import add_round
    from symprune.tracking.tracker import choose as choose_loggers
    from symprune.tracking.tracker import tracked

    begun, plan, place = time.perf_counter(), read_plan(file), read_device(device)
    loggers = choose_loggers(report_to or [])
    if not dry_run:
        _make(output, "histories.json", "summary.json", BILL)
    problem = make_problem(**plan.problem)
    optimum = _optimum(problem) if plan.metric in ("gap", "distance") else None
    setting = Setting(plan.rounds, plan.seeds, plan.metric, plan.evaluate_every, optimum)
    settings = {"plan": str(file), "problem": problem.name, "rounds": plan.rounds}
    there = problem.to(place)
    lines: list[Line] = []
    with (
        tracked(
            [] if dry_run else loggers, output.name, settings, console.remark, console.warn
        ) as tracker,
        console.display() as shown,
    ):
        foreseen = Foreseen(shown.tell, dry_run)
        found = forecast_comparison(
            plan, there, setting, output, shown.tell, time.perf_counter, begun
        )
        if foreseen.go_on(found):
            lines = [
                run_entry(there, entry, setting, shown.tell, partial(add_round, tracker))
                for entry in plan.entries
            ]
    if dry_run:
        show_forecast(found, None)
        return
    rows = summary(lines, plan.metric, plan.targets, problem.clients)
    console.out.print(_summary_table(rows, problem.name))
    from symprune.fed.compare.plots import plot, plot_bill

    picture = output / f"{plan.metric}-against-bytes.png"
    with _writing(output):
        durable.write_text(output / "summary.json", json.dumps(rows, indent=1))
        durable.write_text(output / "histories.json", json.dumps(_histories(lines)))
        plot(lines, plan.metric, problem.clients, picture, title=problem.name)
        plot_bill(lines, problem.clients, output / BILL, problem.name)
    console.say(f"Table, histories, {picture.name} and {BILL} are in {output}.")
    for line in lines:
        above = {ended_above_start(history) for history in line.histories} - {None}
        for sentence in sorted(filter(None, above)):
            console.warn(f"{line.entry.title}: {sentence}.")


def _optimum(problem: Problem) -> Any:
    from symprune.fed.problems.optimum import minimise

    return minimise(problem)


def _now(record: Record) -> str:
    """The figure to watch."""
    shown = next((name for name in ("accuracy", "r2", "loss") if name in record), None)
    return "" if shown is None else f"{shown} {record[shown]:.4f}"


def _result_table(result: Result, problem: Problem) -> Table:
    table = Table("", "start", "end", title=f"{result.algorithm.name} on {problem.name}")
    first, last = result.history[0], result.history[-1]
    for key, value in last.items():
        table.add_row(key.replace("_", " "), _show(first.get(key)), _show(value))
    return table


def _summary_table(rows: list[Record], title: str) -> Table:
    columns = [c for c in rows[0] if c != "options"]
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(_show(row[c]) for c in columns))
    return table


def _show(value: Any) -> str:
    if value is None:
        return "never"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _histories(lines: list[Line]) -> dict[str, Any]:
    return {line.entry.title: line.histories for line in lines}


def _make(folder: Path, first: str, *others: str) -> None:
    """The folder for the results, before the work begins rather than after it. What is there by the
    name of a result is replaced only beside the file that comes `first` with it."""
    for name in others:
        if (folder / name).exists() and not (folder / first).is_file():
            raise SympruneError(
                f"The folder {folder} has a {name} that is no result of symprune; use another."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SympruneError(f"The folder {folder} cannot be made: {error.strerror}.") from None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """A disk that is full, or will not be written to, in a sentence that names the folder."""
    try:
        yield
    except Exception as error:
        raise durable.explain(folder, error) from error


def _write(
    folder: Path, result: Result, problem: Problem, bill: dict[str, dict[str, float]]
) -> None:
    from symprune.fed.compare.plots import plot_traffic
    from symprune.fed.problems.models.lora import about_adapters

    content = {
        "algorithm": repr(result.algorithm),
        "problem": problem.name,
        "bill": bill,
        "history": result.history,
    }
    durable.write_text(folder / HISTORY, json.dumps(content, indent=1))
    tensors = {name: part.cpu().contiguous().clone() for name, part in result.parameters.items()}
    durable.write_tensors(folder / MODEL, tensors, about_adapters(problem.loss))
    title = f"{result.algorithm.name} on {problem.name}"
    plot_traffic(result.history, problem.clients, folder / BILL, title)
