"""The command line: every command in one place, and bad input as one sentence with exit code 2."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from symprune import __version__
from symprune.cli import (
    compare,
    console,
    doctor,
    measure,
    merge,
    pack,
    prune,
    repeat,
    run,
    share,
)
from symprune.cli.screen.help import App
from symprune.fed.cli.main import app as federated

app = App(
    help="Make a pretrained language model sparse without training it, and see what was kept.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(prune.prune)
app.command("refine")(prune.refine_masks)
app.command()(prune.sweep)
app.command("eval")(measure.evaluate)
app.command()(measure.inspect)
app.command()(measure.verify)
app.command()(measure.report)
app.command()(run.bench)
app.command()(run.generate)
app.command()(compare.compare)
app.command()(compare.recommend)
app.command()(pack.pack)
app.command()(pack.unpack)
app.command()(merge.merge)
app.command()(share.push)
app.command()(repeat.repeat)
app.command()(doctor.doctor)
app.add_typer(federated, name="fed")


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option(console.DEBUG, help="Of any command: show where an error happened.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option(console.QUIET, help="Of any command: the result and errors, no more.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            console.VERBOSE, help="Of any command: also every matrix, and what libraries say."
        ),
    ] = False,
) -> None:
    if quiet or verbose:  # elsewhere than in a terminal they have been taken out by then
        console.speak(quiet, verbose)
    if version:
        typer.echo(f"symprune {__version__}")
        raise typer.Exit


@app.command()
def models() -> None:
    """List the short names of models and what they stand for."""
    from symprune.models.hub import SHORT_NAMES, resolve

    table = Table("name", "stands for")
    for name in SHORT_NAMES:
        origin = resolve(name)
        table.add_row(name, origin.gguf_file + " (installed)" if origin.gguf_file else str(origin))
    console.out.print(table)
    console.out.print("Any other hub id, local folder or .gguf file works as well.")


@app.command()
def methods() -> None:
    """List the pruning criteria, their formulas and parameters.

    W is \\[out, in]; x and y are the norms of a layer's input and output channels, r and c the l1
    norms of a weight's row and column.
    """
    from symprune import criteria

    table = Table("method", "score", "parameters (defaults)")
    for name, item in criteria.available().items():
        parameters = ", ".join(f"{key}={value}" for key, value in item.defaults.items())
        table.add_row(name, item.formula, parameters)
    console.out.print(table)


def main() -> None:
    """The console script."""
    console.run(app)
