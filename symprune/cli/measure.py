"""The commands that look at a model: eval, inspect, verify, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from symprune.cli import console
from symprune.cli import options as o
from symprune.cli.groups import Loading, TrustRemoteCode, expand
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
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Zero-shot tasks of lm-eval instead, separated by commas: boolq,rte,hellaswag,"
            "winogrande,arc_easy,arc_challenge,openbookqa (all seven: [bold]thesis[/bold])."
        ),
    ] = None,
    task_data: Annotated[
        Path | None,
        typer.Option(help="Folder of TASK.jsonl files: lm-eval's own prompts without a network."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N questions of each task.")
    ] = None,
    batch_size: Annotated[
        str, typer.Option(help="Batch size for tasks: auto or a number.")
    ] = "auto",
    dtype: o.Dtype = "auto",
    compute_dtype: o.ComputeDtype = "auto",
    device: o.Device = "auto",
    json_file: o.JsonFile = None,
    loading: Loading,
) -> None:
    """Measure a model: perplexity as the papers do, or zero-shot tasks.

    For perplexity the held-out text is one long row of tokens, cut into windows that do not
    overlap; the figure is exp(mean negative log likelihood of a token). With --tasks, lm-eval
    measures accuracies with standard errors and their mean, and perplexity only if --data is given.
    """
    if not tasks and (task_data or limit or batch_size != "auto"):
        raise SympruneError("--task-data, --limit and --batch-size go with --tasks.")
    durable.check_file(json_file, o.JSON)
    console.prepare_libraries()
    record: dict[str, object] = {"model": model}
    if tasks:
        from symprune.checkpoint.load import load_computing
        from symprune.eval import zeroshot
        from symprune.models import hub

        names = list(zeroshot.THESIS_TASKS) if tasks == "thesis" else tasks.split(",")
        names = [name.strip() for name in names if name.strip()]
        zeroshot.check_tasks(names, task_data)
        with console.display() as shown:
            shown.tell(f"Loading {model}")
            origin, where = hub.resolve(model, loading.access()), hub.pick_device(device)
            loaded, _ = load_computing(origin, dtype, where, compute_dtype, dequantize=False)
            tokenizer = hub.load_tokenizer(origin)
        result = zeroshot.evaluate(
            loaded, tokenizer, names, task_data=task_data, limit=limit, batch_size=batch_size
        )
        console.out.print(zeroshot.table(result))
        record["zeroshot"] = result.to_json()
        del loaded
    if data or not tasks:
        from symprune.jobs.evaluate import evaluate as measure

        with console.display() as shown:
            measured = measure(
                model, data or "wikitext2", seqlen, windows, dtype, device,
                shown.tell, shown.watch_eval, loading.access(), bos or "auto", compute_dtype,
            )  # fmt: skip
        table = Table("model", "data", "windows", "seqlen", "perplexity")
        table.add_row(
            model, measured["data"], str(measured["windows"]), str(measured["seqlen"]),
            f"{measured['perplexity']:.3f}",
        )  # fmt: skip
        console.out.print(table)
        console.notes(measured["notes"])
        record |= measured
    o.write_json(json_file, record)


def inspect(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    json_file: o.JsonFile = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show how sparse a saved model is, matrix by matrix, and the recipe that made it."""
    from symprune.checkpoint.record import is_ours, read_record
    from symprune.eval.tables import percent
    from symprune.jobs.inspect import inspect_folder

    if not folder.is_dir():
        raise SympruneError(f"There is no folder {folder}.")
    durable.check_file(json_file, o.JSON)
    console.prepare_libraries()
    facts = inspect_folder(folder, trust_remote_code)
    table = Table("matrix", "shape", "zeros", "sparsity", "pattern")
    for fact in facts:
        shape = " x ".join(str(n) for n in fact.shape)
        table.add_row(fact.name, shape, f"{fact.zeros:,}", percent(fact.sparsity), fact.pattern)
    console.out.print(table)
    zeros, size = sum(f.zeros for f in facts), sum(f.size for f in facts)
    share = percent(zeros / size)
    console.out.print(f"All of them: {zeros:,} of {size:,} weights are zero, {share}.")
    record = read_record(folder)
    recipe = record.get("recipe") if record and is_ours(record) else None
    if record and recipe is not None:
        console.say(f"Made by symprune {record['versions']['symprune']} with this recipe:")
        console.out.print_json(json.dumps(recipe))
    else:
        console.out.print("No symprune.json: the recipe is unknown.")
    matrices = [{**vars(f), "sparsity": f.sparsity} for f in facts]
    o.write_json(json_file, {"matrices": matrices, "sparsity": zeros / size, "recipe": recipe})


def verify(
    folder: Annotated[Path, typer.Argument(help="A folder that symprune wrote.")],
    json_file: o.JsonFile = None,
) -> None:
    """Check that a saved model is as it was written, to the byte; exit code 2 if it is not.

    Files that are missing, changed, or added where a loader would read them are damage. A file
    that no loader reads, such as a README, is mentioned.
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
