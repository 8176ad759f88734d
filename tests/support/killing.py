"""Prune, and be killed: `python killing.py MODEL OUTPUT FIRST TEXT` prints the number of kills.

Every attempt is a process of its own, forked from this one, which computes nothing itself. The
first is left alone and writes FIRST; those for OUTPUT get SIGKILL after a random part of its time.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from symprune import Recipe
from symprune.checkpoint import resume
from symprune.jobs import pruning


def begin(model: str, output: str, text: str) -> int:
    """The process id of a run; returns when it has begun."""
    process = os.fork()
    if process == 0:
        try:
            recipe = Recipe(calibration=text, nsamples=4, seqlen=32)
            pruning.prune(pruning.Job(model, recipe, Path(output), eval_data=text, eval_windows=2))
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
    begun = resume.work_folder(Path(output)) / resume.FILE
    while not begun.exists() and not os.waitid(
        os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT
    ):
        time.sleep(0.002)
    return process


def repeat(attempt: Callable[[int], int]) -> NoReturn:
    """Attempt something, told how often it was killed before, until it is not; then end as it did,
    with the number of kills printed. attempt returns how its process ended."""
    killed = 0
    while os.WIFSIGNALED(status := attempt(killed)):
        killed += 1
    print(killed)
    sys.exit(os.waitstatus_to_exitcode(status))


def main(model: str, output: str, first: str, text: str) -> None:
    process, start = begin(model, first, text), time.monotonic()
    if os.waitpid(process, 0)[1]:
        sys.exit("The first run failed.")
    whole, chance = time.monotonic() - start, random.Random(0)

    def attempt(killed: int) -> int:
        process = begin(model, output, text)
        if killed < 5:
            time.sleep(chance.uniform(0, whole / 5))
            os.kill(process, signal.SIGKILL)
        return os.waitpid(process, 0)[1]

    repeat(attempt)


if __name__ == "__main__":
    main(*sys.argv[1:])
