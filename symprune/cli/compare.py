"""The commands that help to choose: compare, recommend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symprune.cli import console
from symprune.cli import options as o
from symprune.cli.groups import Loading, expand
from symprune.cli.showing import (
    Foreseen,
    Showing,
    conclude_comparison,
    show_forecast,
    show_samples,
)
from symprune.machine import durable

PERPLEXITY = "Perplexity"
Html = Annotated[Path | None, typer.Option("--html", help="Also draw the result as one HTML page.")]


@expand
def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Two or more: hub id, local folder (dense, pruned or packed), .gguf file, short "
            "name, the symprune.json of a run, or what `eval --tasks --json` wrote.",
        ),
    ],
    *,
    showing: Showing,
    evaluate: Annotated[
        bool,
        typer.Option("--eval/--no-eval", help="Measure perplexity.", rich_help_panel=PERPLEXITY),
    ] = True,
    data: Annotated[
        str,
        typer.Option(help="builtin, wikitext2, c4 or a text file.", rich_help_panel=PERPLEXITY),
    ] = "builtin",
    windows: Annotated[
        int, typer.Option(min=1, help="Windows of that text.", rich_help_panel=PERPLEXITY)
    ] = 8,
    seqlen: Annotated[
        int, typer.Option(min=2, help="Tokens per window.", rich_help_panel=PERPLEXITY)
    ] = 512,
    speed: Annotated[
        bool, typer.Option("--speed", help="Measure speed and memory as well, in turns, as bench.")
    ] = False,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    dry_run: o.DryRun = False,
    json_file: o.JsonFile = None,
    html_file: Html = None,
    loading: Loading,
) -> None:
    """Show models and runs side by side: sparsity, masks, perplexity, errors, samples.

    What a run recorded (errors per layer, perplexities, tasks) is taken from its record; perplexity
    on one text and the samples are measured now.

    [bold]Example[/bold]

      symprune compare smollm2-135m ./pruned ./packed --html compare.html
    """
    from symprune.eval import comparison
    from symprune.eval.report import check_page, write_comparison
    from symprune.jobs.choosing import compare as job

    durable.check_file(json_file, o.JSON)
    durable.check_file(html_file)
    if html_file is not None:
        check_page(html_file)
    asked = job.Comparison(
        models, showing.prompts(), data if evaluate else None, windows, seqlen, speed, dtype,
        device, loading.access(),
    )  # fmt: skip
    console.prepare_libraries()
    with console.display() as shown:
        foreseen = Foreseen(shown.tell, dry_run)
        record = job.compare(asked, shown.tell, shown.begin, shown.watch_eval, foreseen.go_on)
    if dry_run:
        show_forecast(foreseen.found, json_file)
        return
    for part in comparison.show(record, console.out.width):
        console.out.print(part)
    show_samples(record)
    console.notes(record["notes"])
    o.write_json(json_file, record)
    if html_file is not None:
        console.say_saved(write_comparison(record, html_file))
    conclude_comparison(record, html_file is not None)


@expand
def recommend(
    model: o.Model,
    *,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="60%", help="The share of the dense model's size it may take, packed."
        ),
    ] = None,
    perplexity: Annotated[
        str | None,
        typer.Option(metavar="+10%", help="How much higher than dense its perplexity may be."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="What was tried, one JSON line each; an existing file is continued. "
            "[dim]\\[recommend-MODEL.jsonl][/dim]",
        ),
    ] = None,
    calibration: Annotated[
        str,
        typer.Option(rich_help_panel=o.CALIBRATION, help="c4, wikitext2, builtin, or a text file."),
    ] = "builtin",
    nsamples: Annotated[
        int, typer.Option(help="Calibration windows.", rich_help_panel=o.CALIBRATION)
    ] = 16,
    seqlen: Annotated[
        int, typer.Option(help="Tokens per window.", rich_help_panel=o.CALIBRATION)
    ] = 512,
    eval_data: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=o.EVALUATION,
            help="Held-out text: wikitext2, builtin, c4 or a file. "
            "[dim]\\[wikitext2; builtin with --calibration builtin][/dim]",
        ),
    ] = None,
    eval_windows: Annotated[
        int, typer.Option(min=1, help="Windows of that text.", rich_help_panel=o.EVALUATION)
    ] = 8,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    dry_run: o.DryRun = False,
    json_file: o.JsonFile = None,
    loading: Loading,
) -> None:
    """Find a recipe for a size or a perplexity, by trying a few on little text.

    Recipes, amounts and values that ship with symprune are tried on held-out text; how long that
    takes is said before. What is done is kept, so the same command goes on where it was stopped.

    [bold]Examples[/bold]

      symprune recommend --model smollm2-135m --size 60%

      symprune recommend --model smollm2-135m --perplexity +10%
    """
    from symprune.errors import Interrupted
    from symprune.eval import recommendation
    from symprune.jobs.choosing import choices
    from symprune.jobs.choosing import recommend as job
    from symprune.jobs.preparation import default_held_out

    durable.check_file(json_file, o.JSON)
    wish = job.Wish(
        model,
        None if size is None else choices.read_size(size),
        None if perplexity is None else choices.read_loss(perplexity),
        output, calibration, nsamples, seqlen, eval_data or default_held_out([calibration]),
        eval_windows, dtype, device, loading.access(),
    )  # fmt: skip
    console.prepare_libraries()
    with console.display() as shown:
        foreseen = Foreseen(shown.tell, dry_run)
        try:
            record = job.recommend(
                wish, shown.tell, shown.watch, shown.watch_eval, shown.begin, foreseen.go_on
            )
        except KeyboardInterrupt as error:
            kept = f"Interrupted: what was tried is kept in {wish.file}; the same command goes on."
            raise Interrupted(kept) from error
    if dry_run:
        show_forecast(foreseen.found, json_file)
        return
    for part in recommendation.show(record, console.out.width):
        console.out.print(part, highlight=False)
    console.conclude(recommendation.verdict(record))
    for command in recommendation.steps(record):
        console.say("  ", (command, "cyan"))
    o.write_json(json_file, record)
