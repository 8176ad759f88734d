"""The commands that look at a model: eval, inspect, verify, report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from symprune.cli import console
from symprune.cli import options as o
from symprune.cli.groups import Loading, TrustRemoteCode, expand
from symprune.cli.showing import Foreseen, show_forecast
from symprune.errors import SympruneError
from symprune.machine import durable


@expand
def evaluate(
    model: o.Model,
    *,
    data: Annotated[
        str | None,
        typer.Option(help="wikitext2, builtin, c4 or a text file. [dim]\\[wikitext2][/dim]"),
    ] = None,
    seqlen: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 2048,
    windows: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N windows.")
    ] = None,
    bos: o.Bos = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="DENSE",
            help="Also compare its predictions with those of this model, on the first 16 windows "
            "or as many as --windows says: KL divergence, and how often both find the same token "
            "likeliest.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks of lm-eval instead, separated by commas, as mmlu or gsm8k; "
            "[bold]default[/bold]: hellaswag, winogrande, piqa, arc_easy, arc_challenge, boolq, "
            "openbookqa; [bold]thesis[/bold]: with rte for piqa."
        ),
    ] = None,
    task_data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of TASK.jsonl files or copies of the data sets: lm-eval's own prompts "
            "without a network."
        ),
    ] = None,
    num_fewshot: Annotated[
        int, typer.Option(min=0, help="Examples with answers in the prompt of a task.")
    ] = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N questions of each task.")
    ] = None,
    batch_size: Annotated[
        str, typer.Option(help="Batch size for tasks: auto or a number.")
    ] = "auto",
    dtype: o.Dtype = "auto",
    compute_dtype: o.ComputeDtype = "auto",
    device: o.Device = "auto",
    dry_run: o.DryRun = False,
    json_file: o.JsonFile = None,
    loading: Loading,
) -> None:
    """Measure a model: perplexity as the papers do, or zero-shot tasks.

    For perplexity the held-out text is one long row of tokens, cut into windows that do not
    overlap; the figure is exp(mean negative log likelihood of a token). With --tasks, lm-eval
    measures accuracies with standard errors and their mean, and perplexity only if --data is given.
    """
    if not tasks and (task_data or limit or num_fewshot or batch_size != "auto"):
        raise SympruneError("--task-data, --num-fewshot, --limit and --batch-size go with --tasks.")
    if tasks and data and dry_run:
        raise SympruneError("--dry-run is of tasks or of perplexity: leave out --data or --tasks.")
    if tasks and against and not data:
        raise SympruneError("--against compares on a text: leave out --tasks, or give --data.")
    durable.check_file(json_file, o.JSON)
    console.prepare_libraries()
    record: dict[str, object] = {"model": model}
    if tasks:
        from symprune.checkpoint.load import load_computing
        from symprune.eval import zeroshot
        from symprune.jobs.estimate.tasks import TasksAhead
        from symprune.models import hub

        names, begun = zeroshot.choose_tasks(tasks), time.perf_counter()
        zeroshot.check_tasks(names, task_data, num_fewshot)
        with console.display() as shown:
            shown.tell(f"Loading {model}")
            origin, where = hub.resolve(model, loading.access()), hub.pick_device(device)
            loaded, stored = load_computing(origin, dtype, where, compute_dtype, dequantize=False)
            tokenizer = hub.load_tokenizer(origin)
        foreseen = Foreseen(console.remark, dry_run)
        ahead = TasksAhead(names, loaded, stored, device, begun, foreseen.go_on)
        result = zeroshot.evaluate(
            loaded, tokenizer, names,
            task_data=task_data, limit=limit, num_fewshot=num_fewshot, batch_size=batch_size,
            foresee=ahead.foresee,
        )  # fmt: skip
        if dry_run:
            show_forecast(foreseen.found, json_file)
            return
        console.out.print(zeroshot.table(result))
        record["zeroshot"] = result.to_json()
        del loaded
    if data or not tasks:
        from symprune.eval import tables
        from symprune.jobs.evaluate import evaluate as measure

        with console.display() as shown:
            foreseen = Foreseen(shown.tell, dry_run)
            measured = measure(
                model, data or "wikitext2", seqlen, windows, dtype, device,
                shown.tell, shown.watch_eval, loading.access(), bos or "auto", compute_dtype,
                against, foreseen.go_on,
            )  # fmt: skip
        if dry_run:
            show_forecast(foreseen.found, json_file)
            return
        table = Table("model", "data", "windows", "seqlen", "perplexity")
        table.add_row(
            model, measured["data"], str(measured["windows"]), str(measured["seqlen"]),
            f"{measured['perplexity']:.3f}",
        )  # fmt: skip
        console.out.print(table)
        if against is not None:
            console.out.print(tables.against(measured["against"]))
        console.notes(measured["notes"])
        record |= measured
    o.write_json(json_file, record)


def inspect(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also every matrix, every layer's experts, the whole recipe."),
    ] = False,
    load: Annotated[
        bool,
        typer.Option(
            "--load/--no-load", help="Of a mixture of experts: measure what each has to do."
        ),
    ] = True,
    calibration: Annotated[
        str, typer.Option(help="The text for that.", rich_help_panel=o.CALIBRATION)
    ] = "builtin",
    nsamples: Annotated[
        int, typer.Option(min=1, help="Windows of it.", rich_help_panel=o.CALIBRATION)
    ] = 4,
    seqlen: Annotated[
        int, typer.Option(min=2, help="Tokens per window.", rich_help_panel=o.CALIBRATION)
    ] = 256,
    json_file: o.JsonFile = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show how sparse a saved model is, and the recipe that made it; --all: matrix by matrix.

    Of a mixture of experts also what its routers give each expert to do, on a little text.
    """
    from symprune.checkpoint.record import is_ours, read_record
    from symprune.eval import experts, tables
    from symprune.jobs.experts.load import measure
    from symprune.jobs.inspect import inspect_folder
    from symprune.models.hub import Access

    if not folder.is_dir():
        raise SympruneError(f"There is no folder {folder}.")
    durable.check_file(json_file, o.JSON)
    console.prepare_libraries()
    with console.doing(f"Reading {folder}"):
        facts = inspect_folder(folder, trust_remote_code)
    measured, notes = None, []
    if load:
        with console.display() as shown:
            access = Access(trust_remote_code=trust_remote_code)
            text = (calibration, nsamples, seqlen)
            try:
                measured = measure(
                    folder, access, *text, lambda n, of: shown.count("load per expert", n, of, "")
                )
            except SympruneError as error:
                notes.append(f"What experts have to do was not measured: {error}")
    matrices = [{**vars(f), "kind": f.kind, "sparsity": f.sparsity} for f in facts]
    zeros, size = sum(f.zeros for f in facts), sum(f.size for f in facts)
    share = tables.percent(zeros / size)
    console.say(
        (f"{len(facts)} matrices: {zeros:,} of {size:,} weights are zero, {share}.", "bold")
    )
    console.out.print(tables.inspected_by_kind(matrices))
    if everything:
        console.out.print(tables.inspected(matrices))
    record = read_record(folder)
    ours = record if is_ours(record) else None
    recipe = ours.get("recipe") if ours else None
    if measured is not None:
        console.say(experts.summary(measured))
        if everything:
            console.out.print(experts.by_layer(measured))
    before = experts.by_expert(ours.get("experts") if ours else None)
    if before is not None and everything:
        console.out.print(before)
    if record and recipe is not None:
        console.say(f"Made by symprune {record['versions']['symprune']}: {record['description']}.")
        for entry in record["perplexity"]:
            console.say(tables.describe_perplexity(entry))
        if everything:
            console.out.print_json(json.dumps(recipe))
    else:
        console.say("No symprune.json: the recipe is unknown.")
    console.notes(notes)
    if not everything:
        layers = "" if measured is None and before is None else ", every layer's experts"
        console.say(f"--all shows every matrix{layers} and the whole recipe.")
    found = {"matrices": matrices, "sparsity": zeros / size, "recipe": recipe}
    o.write_json(json_file, {**found, **({"experts": measured} if measured else {})})


def verify(
    folder: Annotated[Path, typer.Argument(help="A folder that symprune wrote.")],
    json_file: o.JsonFile = None,
) -> None:
    """Check that a saved model is as it was written, to the byte; exit code 2 if it is not.

    Files that are missing, changed, or added where a loader would read them are damage. A card
    that was edited, or a file that no loader reads, is mentioned.
    """
    from symprune.checkpoint import verify as checking
    from symprune.eval.tables import size

    durable.check_file(json_file, o.JSON)
    with console.display() as shown:
        verdict = checking.verify(folder, lambda done, of: shown.begin(done, of, "verifying"))
    o.write_json(json_file, {"folder": str(folder), **verdict.to_dict()})
    if verdict.findings:
        table = Table("file", "what is the matter")
        for finding in verdict.findings:
            table.add_row(Text(console.strip_controls(finding.name)), finding.describe())
        console.out.print(table)
    console.notes(verdict.tensors)
    if not verdict.is_whole:
        raise SympruneError(f"{folder} is not as symprune wrote it: {verdict.describe()}.")
    console.say(f"{verdict.files} files, {size(verdict.size)}: all as symprune wrote them.")


def report(
    source: Annotated[
        Path,
        typer.Argument(
            help="A pruned model's folder, the .jsonl file of a sweep or the .json file of a bench."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
    matrix: Annotated[
        str | None, typer.Option(help="Which matrix to draw. [dim]\\[one in the middle][/dim]")
    ] = None,
    force: o.Force = False,
) -> None:
    """Draw a run, a sweep or a bench as one HTML page that needs no network to view."""
    from symprune.eval.report import write

    page = write(source, output, force=force, matrix=matrix)
    console.say_saved(page)
