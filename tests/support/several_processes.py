"""Prunes a model in several ways, in every process a launcher starts.

    torchrun ... several_processes.py MODEL TEXT OUTPUT NAME...

NAME is one of WAYS; the result is in OUTPUT/NAME.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from symprune import Recipe
from symprune.jobs import pruning
from symprune.machine import distributed

# Steps that rest on Gram matrices, and where these are kept.
WAYS: dict[str, tuple[Recipe, str]] = {
    "balanced": (Recipe.named("balanced"), "auto"),
    "swap and lsq": (Recipe("symwanda", refine="swap", update="lsq"), "disk"),
    "sparsegpt": (Recipe("wanda", update="sparsegpt"), "auto"),
    "admm": (Recipe("wanda", update="admm"), "auto"),
    "wanda-plus-plus": (Recipe("wanda-plus-plus"), "auto"),
    "permuted": (Recipe("wanda", pattern="2:4", permute="all", update="lsq"), "auto"),
    "int4": (Recipe("wanda", values="int4"), "cpu"),
    "limited": (Recipe("wanda", update="lsq", token_limit=2.0), "auto"),
    "dense inputs": (Recipe("wanda", update="lsq", inputs="dense"), "auto"),
    "group by group": (Recipe("wanda", refine="swap", sequential=True), "auto"),
    "dense targets": (Recipe("wanda", update="lsq", targets="dense"), "disk"),
}


def prune(model: Path, text: str, output: Path, name: str) -> None:
    """Eleven samples: two or three processes cannot share them evenly."""
    recipe, gram_device = WAYS[name]
    recipe = replace(recipe, calibration=text, nsamples=11, seqlen=32)
    pruning.prune(
        pruning.Job(
            str(model), recipe, output / name, "auto", "cpu", False, gram_device=gram_device
        )
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.start(torch.device("cpu"))
    model, text, output, *names = sys.argv[1:]
    for name in names:
        prune(Path(model), text, Path(output), name)
    distributed.stop()
