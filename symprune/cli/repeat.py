"""The command that makes a model again: repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symprune.cli import console
from symprune.cli import options as o
from symprune.cli.groups import Loading, expand
from symprune.cli.prune import do
from symprune.errors import SympruneError


@expand
def repeat(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder that symprune pruned, its README.md or symprune.json, or its name on "
            "the hub."
        ),
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Where the base model is. [dim]\\[where it was][/dim]"),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Where a text is that the run read, if not where it was; repeatable. Its contents "
            "say which one it is."
        ),
    ] = None,
    masks: Annotated[
        Path | None, typer.Option(help="Where the masks are that the run started from.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="The criterion of your own that the recipe names: its code is run only if it is "
            "named here.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Output folder. [dim]\\[NAME-repeated][/dim]"),
    ] = None,
    force: o.Force = False,
    device: o.Device = "auto",
    evaluate: o.Evaluate = True,
    json_file: o.JsonFile = None,
    loading: Loading,
) -> None:
    """Prune again as a card says, and compare the result with what the card came with.

    Texts and masks that were given as files are known by their SHA-256. The same versions of the
    libraries give the same bytes; the exit code is 2 if the weights are others.
    """
    from symprune.criteria import allow_code
    from symprune.jobs.sharing import repeat as repeating

    allow_code(method)
    console.prepare_libraries()
    found = repeating.Source.find(source, loading.access())
    job = repeating.plan_job(
        found, model=model, texts=text or (), masks=masks, output=output, device=device,
        evaluate=evaluate, force=force, access=loading.access(),
    )  # fmt: skip
    if not do(job, json_file):
        return
    result = repeating.compare(found, job.folder)
    changed = repeating.describe_versions(found.plan.versions)
    if result.weights:
        why = changed or "the base model or the processor may be another"
        raise SympruneError(
            f"{job.folder} is not the same model as {source}: {result.weights[0]} differs ({why})."
        )
    if result.why_not:
        console.notes([result.why_not])
    elif result.others:
        console.say(
            f"The same weights and masks, byte for byte; {', '.join(result.others)} differ"
            f"{'s' * (len(result.others) == 1)}."
        )
    else:
        console.say(f"The same bytes: all {result.files} files.")
