"""`symprune fed merge`: adapters of a federated run become part of the pruned model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from symprune.cli import console


def merge(
    adapters: Annotated[
        Path, typer.Argument(help="A run's folder, or the model.safetensors in it.")
    ],
    model: Annotated[str, typer.Option(help="The pruned model they were trained on.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the merged model.")],
    masks: Annotated[
        Path | None, typer.Option(help="File of its masks, if not in its folder.")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Of the adapters, if their file does not say it.")
    ] = None,
) -> None:
    """Merge LoRA adapters into the pruned model they were trained on; its zeros stay."""
    from symprune.fed.adapters import merge_into_folder, read_adapters

    read = read_adapters(adapters, alpha)
    kept = merge_into_folder(model, read, output, masks)
    console.say(
        f"{len(read.layers)} layers changed, {kept.sparsity():.1%} of the weights with masks are "
        "still zero. The model is in ",
        (str(output), "bold"),
    )
