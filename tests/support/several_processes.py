"""Prunes a model in several ways, in every process a launcher starts.

    torchrun ... several_processes.py MODEL TEXT OUTPUT NAME...

NAME is one of WAYS, or of APART, which are interrupted once; the result is in OUTPUT/NAME.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from symprune import Recipe
from symprune.checkpoint.resume import HiddenStates
from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.jobs import pruning
from symprune.machine import distributed

SAMPLES = 11  # two or three processes cannot share them evenly

# What is done, and where Gram matrices are kept for it. Of 5 samples one is held out: not every
# process has one.
WAYS: dict[str, tuple[Recipe, str]] = {
    "mask alone": (Recipe("symwanda"), "auto"),
    "nearest int4": (
        Recipe("symwanda", values={"name": "int4", "solve": "nearest"}, values_head="int8"),
        "auto",
    ),
    "owl": (Recipe("wanda", update="lsq", allocate="owl", nsamples=5), "auto"),
    "search": (Recipe("wanda", allocate={"name": "search", "windows": 3}, nsamples=5), "auto"),
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

# Processes take different blocks.
TRAINED = {"inputs": "dense", "reconstruct": {"name": "block", "epochs": 2, "inputs": "dense"}}
APART: dict[str, tuple[Recipe, str]] = {
    "trained": (Recipe("wanda", update="lsq", allocate="owl", **TRAINED), "auto"),
    "trained, on a grid": (
        Recipe("wanda", pattern="2:4", permute="mlp", values="int4", **TRAINED),
        "auto",
    ),
}


class Killed(BaseException):
    """Stands for a process that ends here."""


@contextmanager
def killed_behind(last: int) -> Iterator[None]:
    """Within, a run ends when a block is finished, hidden states behind it being kept if they can
    be."""
    finish, due = StreamedBlocks.finish, HiddenStates.due

    def then_die(self: StreamedBlocks, index: int, *rest: Any) -> None:
        finish(self, index, *rest)
        if index == last:
            raise Killed

    StreamedBlocks.finish, HiddenStates.due = then_die, lambda _: True  # type: ignore[method-assign]
    try:
        with suppress(Killed):
            yield
    finally:
        StreamedBlocks.finish, HiddenStates.due = finish, due  # type: ignore[method-assign]


def prune(model: Path, text: str, output: Path, name: str) -> None:
    recipe, gram_device = (WAYS | APART)[name]
    samples = min(recipe.nsamples, SAMPLES)
    recipe = replace(recipe, calibration=text, nsamples=samples, seqlen=32)
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
        if name in APART:
            with killed_behind(2):
                prune(Path(model), text, Path(output), name)
        prune(Path(model), text, Path(output), name)
    distributed.stop()
