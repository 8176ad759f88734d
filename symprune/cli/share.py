"""The command that hands a model on, push, and the options of those that do when they are done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from symprune.cli import console
from symprune.cli.groups import HUB, Token
from symprune.errors import SympruneError

if TYPE_CHECKING:
    from symprune.jobs.sharing.push import Target

Public = Annotated[
    bool,
    typer.Option(
        "--private/--public",
        help="Who can read what is pushed: you, or everybody.",
        rich_help_panel=HUB,
    ),
]
PushToHub = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="When it is done, push the output to this name on the hub, OWNER/NAME or NAME.",
        rich_help_panel=HUB,
    ),
]


def push(
    folder: Annotated[Path, typer.Argument(help="A folder that symprune wrote.")],
    name: Annotated[str, typer.Argument(help="OWNER/NAME on the hub, or NAME of your own.")],
    private: Public = True,
    revision: Annotated[
        str | None,
        typer.Option(help="The branch to push to; made if need be. [dim]\\[main][/dim]"),
    ] = None,
    message: Annotated[str | None, typer.Option(help="The commit's message.")] = None,
    token: Token = None,
) -> None:
    """Push a model to the hub, if it is as it was written, with its card, masks and checksums.

    Other files in the folder stay where they are. Cut off, the same command goes on.
    """
    from symprune.jobs.sharing.push import Target

    console.prepare_libraries()
    send(folder, Target(name, private, revision, message, token))


def send(folder: Path, target: Target) -> None:
    """Push, and say where it is."""
    from huggingface_hub.utils import disable_progress_bars

    from symprune.eval.tables import size
    from symprune.jobs.sharing.push import find_local_names, push

    disable_progress_bars()
    named = find_local_names(folder)
    if named:
        console.notes([f"symprune.json names {named[0]} of this machine, which readers will see."])
    with console.display() as shown:
        done = push(folder, target, shown.tell, lambda n, of: shown.begin(n, of, "pushing"))
    console.say(f"Pushed {done['files']} files, {size(done['bytes'])}, to ", (done["url"], "bold"))


def check_target(name: str | None, private: bool, token: str | None) -> Target | None:
    """Where `--push-to-hub` says; fail before any work if the hub would take nothing there."""
    from symprune.jobs.sharing.push import Target
    from symprune.machine import distributed

    if name is None or not distributed.is_first():
        return None
    target = Target(name, private, token=token)
    target.find()
    return target


def send_output(folder: Path, target: Target | None) -> None:
    """Push what a command has made; the folder is there, whatever the hub says."""
    if target is None:
        return
    try:
        send(folder, target)
    except SympruneError as error:
        way = "" if target.private else " --public"
        raise SympruneError(
            f"{error} The model is in {folder}; `symprune push {folder} {target.name}{way}` pushes "
            "it later."
        ) from error
