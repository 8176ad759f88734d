"""The commands that change how a checkpoint is stored: pack, unpack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from symprune.cli import console
from symprune.cli import options as o
from symprune.cli.groups import Token
from symprune.cli.share import Public, PushToHub, check_target, send_output
from symprune.cli.showing import show_forecast

Output = Annotated[Path, typer.Argument(help="The folder to write.")]


def pack(
    folder: Annotated[Path, typer.Argument(help="A pruned model.")],
    output: Output,
    force: o.Force = False,
    dry_run: o.DryRun = False,
    push_to_hub: PushToHub = None,
    private: Public = True,
    token: Token = None,
) -> None:
    """Store a pruned model in less space: its kept weights and one bit per weight, less for N:M.

    symprune's commands and symprune.load() read the packed folder directly.
    """
    from symprune.checkpoint import packed as packing

    if dry_run:
        from symprune.jobs.estimate.packing import forecast_packing

        with console.doing("Packing the first block, in memory"):
            found = forecast_packing(folder, output, force)
        show_forecast(found, None)
        return
    console.mind_network()
    target = check_target(push_to_hub, private, token)
    _do(packing.pack, folder, output, force, "packing")
    send_output(output, target)


def unpack(
    folder: Annotated[Path, typer.Argument(help="A packed model.")],
    output: Output,
    force: o.Force = False,
) -> None:
    """Restore a packed model, byte for byte."""
    from symprune.checkpoint import packed as packing

    _do(packing.unpack, folder, output, force, "unpacking")


def _do(
    action: Callable[..., dict[str, int]], folder: Path, output: Path, force: bool, name: str
) -> None:
    from symprune.eval.tables import size

    with console.display() as shown:
        sizes = action(folder, output, force, lambda done, total: shown.begin(done, total, name))
    before, after = sizes["before"], sizes["after"]
    share = f"{100 * after / before:.3g} % of that" if after != before else "as much"
    console.say(
        f"{size(before)} in {folder}, {size(after)} in ", (str(output), "bold"), f": {share}."
    )
