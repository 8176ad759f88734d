"""The commands. No logic of its own: options in, tables out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from symprune import __version__, console, scores
from symprune.errors import SympruneError
from symprune.recipe import Recipe

app = typer.Typer(
    help="Make a pretrained language model sparse without training it, and see what was kept.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

MODEL_HELP = "Hub id, local folder, .gguf file, or a short name (see [bold]symprune models[/bold])."
Model = Annotated[str, typer.Option("--model", "-m", help=MODEL_HELP)]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, ...")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write the result to this file, as JSON.")
]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"symprune {__version__}")
        raise typer.Exit
    _ = context


@app.command()
def prune(
    model: Model,
    method: Annotated[
        str | None,
        typer.Option(
            help="Criterion; [bold]symprune methods[/bold] lists them. Your own: "
            "module:function. [dim]\\[default: ria][/dim]"
        ),
    ] = None,
    sparsity: Annotated[
        float | None,
        typer.Option(help="Fraction of each group to remove. [dim]\\[default: 0.5][/dim]"),
    ] = None,
    pattern: Annotated[
        str | None, typer.Option(help="N:M instead of a sparsity; 2:4 keeps 2 of every 4.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help="row: every output channel loses the same number (Wanda's way). "
            "layer: one threshold per matrix (RIA's way). [dim]\\[default: row][/dim]"
        ),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Power of the input norm. [dim]\\[ria: 0.5][/dim]")
    ] = None,
    beta: Annotated[
        float | None,
        typer.Option(help="stochria: sampled share. symwanda: power of the output norm."),
    ] = None,
    p: Annotated[float | None, typer.Option("--p", help="lp: which norm; inf is one.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other parameter of the method."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="c4, wikitext2, builtin (Python's documentation, no network), or a text "
            "file. [dim]\\[default: c4][/dim]"
        ),
    ] = None,
    nsamples: Annotated[
        int | None, typer.Option(help="Calibration windows. [dim]\\[default: 128][/dim]")
    ] = None,
    seqlen: Annotated[
        int | None,
        typer.Option(
            help="Tokens per window, at most what the model supports. [dim]\\[default: 2048][/dim]"
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="[dim]\\[default: 0][/dim]")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="YAML or JSON file; options given here override it.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder to write. [dim]\\[default: MODEL-METHOD-50][/dim]"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing output folder.")
    ] = False,
    evaluate: Annotated[
        bool, typer.Option("--eval/--no-eval", help="Measure perplexity before and after.")
    ] = True,
    eval_data: Annotated[
        str | None,
        typer.Option(
            help="Text for it: wikitext2, builtin, c4 or a file. "
            "[dim]\\[default: wikitext2; builtin with --calibration builtin][/dim]"
        ),
    ] = None,
    eval_windows: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many windows of it.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Make a model sparse and show its perplexity before and after.

    [bold]Examples[/bold]

      symprune prune --model llama2-7b --sparsity 0.5

      symprune prune --model ./my-model --method wanda --pattern 2:4 --calibration builtin

      symprune prune --model opt-1.3b --method stochria --beta 0.1 --group layer --alpha 1
    """
    from symprune import run

    changes = _given(
        method=method, sparsity=sparsity, pattern=pattern, group=group, calibration=calibration,
        nsamples=nsamples, seqlen=seqlen, seed=seed,
    )  # fmt: skip
    if sparsity is not None and pattern is not None:
        raise SympruneError("Give --sparsity or --pattern, not both.")
    base = Recipe.load(recipe) if recipe else Recipe()
    chosen = base.with_changes(**changes)
    params = {**_given(alpha=alpha, beta=beta, p=p), **_assignments(set_ or [])}
    if params:
        chosen = chosen.with_changes(params={**chosen.params, **params})
    job = run.Job(
        model, chosen, output, dtype, device, evaluate, eval_data, eval_windows, force
    )  # fmt: skip
    console.quiet_libraries()
    with console.display() as shown:
        record = run.prune(job, shown.tell, shown.watch, shown.watch_eval)
    _show_prune(record)
    _write_json(json_file, record)


def _show_prune(record: dict[str, Any]) -> None:
    from symprune.eval import tables

    console.out.print(tables.by_kind(record["layers"]))
    console.out.print(tables.summary(record))
    for note in record["notes"]:
        console.out.print(f"[yellow]Note:[/yellow] {note}", highlight=False)
    console.out.print(f"Saved to [bold]{record['output']}[/bold]", highlight=False, soft_wrap=True)


@app.command(name="eval")
def eval_(
    model: Model,
    data: Annotated[str, typer.Option(help="wikitext2, builtin, c4 or a text file.")] = "wikitext2",
    seqlen: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 2048,
    windows: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Measure a model's perplexity as the papers do.

    The held-out text is one long row of tokens, cut into windows that do not overlap; the figure is
    exp(mean negative log likelihood of a token).
    """
    from symprune import run

    console.quiet_libraries()
    with console.display() as shown:
        record = run.evaluate(
            model, data, seqlen, windows, dtype, device, shown.tell, shown.watch_eval
        )
    table = Table("model", "data", "windows", "seqlen", "perplexity")
    table.add_row(
        model, data, str(record["windows"]), str(record["seqlen"]), f"{record['perplexity']:.3f}"
    )
    console.out.print(table)
    for note in record["notes"]:
        console.out.print(f"[yellow]Note:[/yellow] {note}", highlight=False)
    _write_json(json_file, record)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    json_file: JsonFile = None,
) -> None:
    """Show how sparse a saved model is: per matrix, the pattern found, and the recipe behind it."""
    from symprune.checkpoint import read_record
    from symprune.eval.tables import percent
    from symprune.inspection import inspect_folder

    if not folder.is_dir():
        raise SympruneError(f"There is no folder {folder}.")
    console.quiet_libraries()
    facts = inspect_folder(folder)
    table = Table("matrix", "shape", "zeros", "sparsity", "pattern")
    for fact in facts:
        shape = " x ".join(str(n) for n in fact.shape)
        table.add_row(fact.name, shape, f"{fact.zeros:,}", percent(fact.sparsity), fact.pattern)
    console.out.print(table)
    zeros, size = sum(f.zeros for f in facts), sum(f.size for f in facts)
    console.out.print(
        f"All of them: {zeros:,} of {size:,} weights are zero, {percent(zeros / size)}."
    )
    record = read_record(folder)
    if record:
        console.out.print(f"Made by symprune {record['versions']['symprune']} with this recipe:")
        console.out.print_json(json.dumps(record["recipe"]))
    else:
        console.out.print("No symprune.json: the recipe is unknown.")
    _write_json(
        json_file,
        {
            "matrices": [{**vars(f), "sparsity": f.sparsity} for f in facts],
            "sparsity": zeros / size,
            "recipe": record["recipe"] if record else None,
        },
    )


@app.command()
def models() -> None:
    """List the short names of models and what they stand for."""
    from symprune.hub import SHORT_NAMES, resolve

    table = Table("name", "is")
    for name in SHORT_NAMES:
        origin = resolve(name)
        table.add_row(name, origin.gguf_file + " (installed)" if origin.gguf_file else str(origin))
    console.out.print(table)
    console.out.print("Any other hub id, local folder or .gguf file works as well.")


@app.command()
def methods() -> None:
    """List the pruning criteria, their formulas and parameters.

    W is [out, in]; x and y are the norms of a layer's input and output channels, r and c the l1
    norms of a weight's row and column.
    """
    table = Table("method", "score", "parameters (defaults)")
    for name, item in scores.available().items():
        parameters = ", ".join(f"{key}={value}" for key, value in item.defaults.items())
        table.add_row(name, item.formula, parameters)
    console.out.print(table)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _assignments(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise SympruneError(f"--set {text!r} is not of the form NAME=VALUE.")
        pairs[name.strip()] = value.strip()
    return pairs


def _write_json(path: Path | None, record: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(record, indent=2, default=str) + "\n")
    except OSError as error:
        raise SympruneError(f"Cannot write {path}: {error.strerror}.") from error


def main() -> None:
    """The console script: bad input is one sentence and exit code 2."""
    try:
        app()
    except SympruneError as error:
        console.err.print(f"[bold red]Error:[/bold red] {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
