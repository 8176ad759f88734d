"""`symprune fed prune`: the options, and the tables a run ends with. No logic of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from symprune.cli import console
from symprune.cli import options as o
from symprune.cli.groups import Choosing, Loading, Refining, expand
from symprune.cli.showing import conclude, show_forecast
from symprune.errors import SympruneError
from symprune.eval import tables
from symprune.machine import durable
from symprune.wording import counted

CLIENTS = "Clients"
PRIVACY = "Privacy"
FLOWER = "Flower"
FEDERATED = "federated"


@expand
def prune(
    model: o.Model,
    *,
    client: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            rich_help_panel=CLIENTS,
            help="A client's private text: a file, c4, wikitext2 or builtin; once per client.",
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=CLIENTS, help="Instead: deal one --calibration set out to so many."
        ),
    ] = None,
    aggregate: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=CLIENTS,
            help="What clients send: statistics, which decide as all text in one place would; or, "
            "each pruning alone, votes on the masks or average, their weights. "
            "[dim]\\[statistics][/dim]",
        ),
    ] = None,
    gram_bits: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=CLIENTS,
            help="swap and --update: what a number of a Gram matrix takes, 64 (exact), 32 or 16. "
            "[dim]\\[64][/dim]",
        ),
    ] = None,
    robust: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=CLIENTS,
            help="Against hostile clients: norm:K leaves out who measures K times as much as "
            "usual; krum:f, trimmed:share, geometric-median; none. [dim]\\[norm:100][/dim]",
        ),
    ] = None,
    secure_sum: Annotated[
        bool,
        typer.Option(
            "--secure-sum", rich_help_panel=PRIVACY, help="The server sees only the clients' sum."
        ),
    ] = False,
    allow_few_tokens: Annotated[
        bool,
        typer.Option(
            "--allow-few-tokens",
            rich_help_panel=PRIVACY,
            help="--deploy: nodes send plain sums of however little text, which give its words "
            "away.",
        ),
    ] = False,
    epsilon: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=PRIVACY,
            help="Clip and noise what a client sends, so that the whole run is (epsilon, delta)-"
            "private for each of its windows.",
        ),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(rich_help_panel=PRIVACY, help="[dim]\\[1e-5][/dim]")
    ] = None,
    clip: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=PRIVACY,
            help="A window may differ from the reference by so much (root mean square, relative). "
            "[dim]\\[0.5][/dim]",
        ),
    ] = None,
    honest: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=PRIVACY,
            help="With --secure-sum clients share the noise; so many are counted on. "
            "[dim]\\[as many as every sum has for sure][/dim]",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=PRIVACY,
            help="Public text that noised statistics are measured against. [dim]\\[builtin][/dim]",
        ),
    ] = None,
    choosing: Choosing,
    calibration: o.Calibration = None,
    nsamples: Annotated[
        int | None,
        typer.Option(
            help="Windows of each client; of all together with --clients. "
            "[dim]\\[default: 128][/dim]",
            rich_help_panel=o.CALIBRATION,
        ),
    ] = None,
    seqlen: o.SeqLen = None,
    seed: o.Seed = None,
    bos: o.Bos = None,
    refine: Annotated[
        str | None,
        typer.Option(
            help="Improve the masks: swap, dsnot or r2-dsnot.", rich_help_panel=o.REFINEMENT
        ),
    ] = None,
    max_swaps: o.MaxSwaps = None,
    refining: Refining,
    update: o.UpdateName = None,
    update_iters: o.UpdateIters = None,
    rounds: o.Rounds = None,
    dtype: o.Dtype = "auto",
    compute_dtype: o.ComputeDtype = "auto",
    device: o.Device = "auto",
    output: o.Output = None,
    force: o.Force = False,
    evaluate: o.Evaluate = True,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=o.EVALUATION, help="As for prune; several are measured one by one."
        ),
    ] = None,
    eval_windows: o.EvalWindows = None,
    json_file: o.JsonFile = None,
    dry_run: o.DryRun = False,
    loading: Loading,
    deploy: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=FLOWER,
            help="Run it on Flower: a server and a node for each --client, separate processes with "
            "TLS and keys, in this folder; used again, it goes on.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(rich_help_panel=FLOWER, help="The SuperLink's port. [dim]\\[8000][/dim]"),
    ] = None,
    node_port: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=FLOWER, help="Node i listens on this port + i. [dim]\\[9094][/dim]"
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=FLOWER, help="Seconds a block waits for a node. [dim]\\[600][/dim]"
        ),
    ] = None,
) -> None:
    """Prune one language model with calibration text that stays with its owners.

    Clients return sums per channel or, for swap and --update, Gram matrices; the server decides
    the masks and weights: the same as if all text were in one place. Here all parties run in this
    process and exchange the bytes they would send.

    [bold]Examples[/bold]

      symprune fed prune --model llama2-7b --pattern 2:4 --client a.txt --client b.txt --secure-sum

      symprune fed prune --model smollm2-135m --clients 4 --calibration builtin --nsamples 16
    """
    from symprune.fed.pruning import job as jobs
    from symprune.fed.pruning.noise import Privacy

    if client and calibration is not None:
        raise SympruneError("--calibration goes with --clients; each --client has its own text.")
    chosen = choosing.build(
        nsamples=nsamples, seqlen=seqlen, seed=seed, bos=bos,
        calibration=FEDERATED if client else calibration,
    )  # fmt: skip
    steps = refining.select_given() | o.select_given(max_swaps=max_swaps)
    chosen = o.with_step(chosen, "refine", refine, steps)
    fitting = o.select_given(iters=update_iters, rounds=rounds)
    chosen = o.with_step(chosen, "update", update, fitting)
    noised = o.select_given(delta=delta, clip=clip, honest=honest)
    if epsilon is None and (noised or reference is not None):
        option = next(iter(noised), "reference")
        raise SympruneError(f"--{option} goes with --epsilon.")
    job = jobs.PruningJob(
        model, chosen, tuple(client or ()), clients, secure_sum,
        None if epsilon is None else Privacy(epsilon, **noised), reference or "builtin",
        output, dtype, device, evaluate, tuple(eval_data or ()), eval_windows, force,
        loading.access(), compute_dtype,
        **o.select_given(aggregate=aggregate, gram_bits=gram_bits, robust=robust),
        allow_few_tokens=allow_few_tokens,
    )  # fmt: skip
    durable.check_file(json_file, o.JSON)
    asked = o.select_given(port=port, node_port=node_port, timeout=timeout)
    if deploy is not None:
        if dry_run:
            raise SympruneError("--dry-run is of a run in this process: leave out --deploy.")
        _deploy(job, deploy, asked, json_file)
        return
    if allow_few_tokens:
        raise SympruneError("--allow-few-tokens goes with --deploy: here nothing is sent.")
    for option in asked:
        raise SympruneError(f"--{option.replace('_', '-')} goes with --deploy.")
    _do(job, json_file, dry_run)


def _deploy(job: Any, folder: Path, asked: dict[str, Any], json_file: Path | None) -> None:
    from symprune.fed.cli.deploy import follow
    from symprune.fed.flower.apps import need_flower
    from symprune.fed.pruning import remote

    need_flower()
    from symprune.fed.flower.deploy import Deployment

    console.prepare_libraries()
    task, settings = remote.of_job(job)
    deployment = Deployment(folder, task, settings=settings, **asked)
    follow(deployment, "blocks")
    record = json.loads(deployment.result.read_text())
    console.out.print(tables.by_kind(record["layers"]))
    console.out.print(_traffic(record["federated"]))
    console.notes([*record["notes"], *_promise(record["federated"])])
    place = deployment.result.parent
    console.say_saved(place)
    conclude({**record, "output": str(place)})
    o.write_json(json_file, record)


def _do(job: Any, json_file: Path | None, dry_run: bool) -> None:
    from symprune.fed.pruning import job as jobs

    console.prepare_libraries()
    found: list[Any] = []

    def begin(forecast: Any) -> bool:
        found.append(forecast)
        return not dry_run

    with console.display() as shown:
        record = jobs.prune(job, shown.tell, shown.watch, shown.watch_eval, begin)
    if dry_run:
        show_forecast(found[0], json_file)
        return
    console.out.print(tables.by_kind(record["layers"]))
    console.out.print(_traffic(record["federated"]))
    console.out.print(tables.summary(record))
    console.notes([*record["notes"], *_promise(record["federated"])])
    console.say_saved(record["output"])
    conclude(record)
    o.write_json(json_file, record)


def _traffic(federated: dict[str, Any]) -> Table:
    """Bytes of all clients together: a block's on average, and the whole run's."""
    traffic = federated["traffic"]
    blocks = traffic["blocks"]
    table = Table(title=f"Traffic of {counted(traffic['clients'], 'client')}", title_justify="left")
    table.add_column("", style="bold")
    decided = "masks and weights" if federated["sends_weights"] else "masks"
    sent = "statistics" if federated["aggregate"] == "statistics" else decided
    columns = (f"{sent} up", f"{decided} down")
    for column in (*columns, "the weights would be", "share"):
        table.add_column(column, justify="right")
    mean = {key: sum(block[key] for block in blocks) / len(blocks) for key in blocks[0]}
    rows = {"a block, on average": (mean["up"], mean["down"], mean["weights"])}
    whole = (traffic["bytes_up"], traffic["bytes_down"], traffic["weights_bytes"])
    rows["all blocks and the set-up"] = whole
    for name, (up, down, weights) in rows.items():
        share = tables.percent((up + down) / weights)
        table.add_row(name, *(tables.size(value) for value in (up, down, weights)), share)
    return table


def _promise(federated: dict[str, Any]) -> list[str]:
    notes = []
    expected = federated["forecast_per_client"]
    if expected["grams"]:
        notes.append(f"Up to {tables.size(expected['grams'])} a client are Gram matrices.")
    notes += [federated["risk"]] if "risk" in federated else []
    if federated["secure_sum"]:
        notes.append("What clients sent was added up behind masks: the server saw sums alone.")
    if "privacy" in federated:
        promised = federated["privacy"]
        shared = promised["honest"] > 1
        who = "The clients' sum" if shared else "All a client sent"
        provided = f", if {promised['honest']} of those in it are honest" if shared else ""
        notes.append(
            f"{who} is ({promised['epsilon']:g}, {promised['delta']:g})-differentially private for "
            f"each window{provided}."
        )
    return notes
