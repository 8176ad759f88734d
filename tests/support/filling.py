"""Prune to a disk that fills up: `python filling.py MODEL TEXT DISK COPY` prints what was said.

DISK becomes a small tmpfs, so this runs in a mount namespace of its own, which takes the disk with
it when it ends: the output is copied to COPY.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from symprune import Recipe
from symprune.errors import SympruneError
from symprune.jobs import pruning


def main(model: str, text: str, disk: Path, copy: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", disk], check=True)
    recipe, filler = Recipe(calibration=text, nsamples=4, seqlen=32), disk / "filler"
    job = pruning.Job(model, recipe, disk / "out", eval_data=text, eval_windows=2)

    def fill(figures: dict[str, Any]) -> None:
        if figures["block"] == 3 and not filler.exists():
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 2**16)

    try:
        pruning.prune(job, show=fill)
    except SympruneError as error:
        print(error)
    if job.folder.exists():
        sys.exit("The disk was not full.")
    filler.unlink()
    pruning.prune(job)
    shutil.copytree(job.folder, copy)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
