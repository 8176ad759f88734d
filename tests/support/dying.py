"""Write a folder, and die at every step: `python dying.py ACTION SOURCE OUTPUT STRIDE` prints how
often.

ACTION is pack, unpack, save, copy or prune. Every attempt is a process of its own, forked from this
one, that gets SIGKILL before its n-th change of the disk; each comes STRIDE changes further than
the one before it, until one comes to the end. After each, OUTPUT must be whole or not there. With a
STRIDE of 0 nothing is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from killing import repeat
from transformers import AutoModelForCausalLM, AutoTokenizer

from symprune import MaskSet, Recipe
from symprune.checkpoint import load, output_folder, packed
from symprune.jobs import pruning
from symprune.machine import checksums, work_folder
from symprune.models import hub

CHANGES = (
    "rename", "replace", "mkdir", "rmdir", "unlink", "fsync", "pwrite", "write", "truncate",
    "posix_fallocate",
)  # fmt: skip


def die_before(number: int) -> None:
    """Let this process be killed before the disk is changed for the n-th time."""
    left = [number]

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*arguments, **options)

        return act

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    work_folder.swap = counted(work_folder.swap)


def save(source: Path, output: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    output_folder.check_output(output, force=True)
    output_folder.save(output, model, tokenizer, {}, MaskSet.of(model))


def copy(source: Path, output: Path) -> None:
    load.make_dense_copy(hub.resolve(str(source)), "auto", output)


def prune(source: Path, output: Path) -> None:
    recipe = Recipe(calibration=__file__, nsamples=2, seqlen=16)
    pruning.prune(pruning.Job(str(source), recipe, output, evaluate=False, force=True))


ACTIONS: dict[str, Callable[[Path, Path], object]] = {
    "pack": partial(packed.pack, force=True),
    "unpack": partial(packed.unpack, force=True),
    "save": save,
    "copy": copy,
    "prune": prune,
}


def attempt(action: str, source: Path, output: Path, number: int) -> int:
    """How a process ended that was to be killed before its n-th change, 0 for never."""
    process = os.fork()
    if process == 0:
        try:
            torch.set_num_threads(1)
            die_before(number)
            ACTIONS[action](source, output)
            os._exit(0)
        except BaseException as error:
            print(f"Before change {number}: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitpid(process, 0)[1]


def check_whole(output: Path) -> None:
    if output.exists() and not checksums.is_whole(output):
        sys.exit(f"{output} is there, but not whole.")


def main(action: str, source: Path, output: Path, stride: int) -> None:
    def attempt_and_check(killed: int) -> int:
        status = attempt(action, source, output, stride * killed + bool(stride))
        check_whole(output)
        return status

    repeat(attempt_and_check)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
