"""The command that puts the parts of a sweep together: merge."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symprune.cli import console
from symprune.cli import options as o
from symprune.cli.showing import conclude_sweep


def merge(
    files: Annotated[
        list[Path], typer.Argument(help="Results of `symprune sweep --shard`, .jsonl files.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write, for `symprune report`.")
    ] = Path("sweep.jsonl"),
    force: o.Force = False,
) -> None:
    """Put the results of a sweep that was divided among machines into one file.

    Cells that are in several files are kept once; where their figures differ that is said.
    """
    from symprune.eval import tables
    from symprune.jobs.sharing import shards
    from symprune.jobs.sweep import over_seeds

    merged = shards.merge(files)
    shards.write(merged, output, force)
    cells = list(merged.cells.values())
    console.out.print(tables.sweep(over_seeds(cells)))
    console.notes(merged.notes)
    conclude_sweep(cells, output)
