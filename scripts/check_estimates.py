"""Is what a run is said to take what it takes? Time within a factor 1.5, memory within 1.2.

    python scripts/check_estimates.py [--recipe fast --recipe balanced] [--random]

prunes SmolLM2-135M, or with --random a model of 1.1 billion random weights, and prints what was
foreseen beside what it took. Every run is a process of its own. On a machine that has other things
to do, --cpu compares the time the processor worked for it, which does not count waiting. Loading
libraries counts on both sides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from random_checkpoint import make_checkpoint, tiny_llama
from rich.table import Table

from symprune.cli import console
from symprune.errors import SympruneError

TIME, MEMORY = 1.5, 1.2
FORESEEN = """
import json, psutil, sys, time
from pathlib import Path
from symprune import Recipe
from symprune.cli import console
from symprune.jobs.estimate.pruning import forecast
from symprune.jobs.pruning import Job
from symprune.jobs.samples import PROMPTS
console.prepare_libraries()
model, name, settings, windows, cpu = json.loads(sys.argv[1])
recipe = Recipe.named(name).with_changes(**settings)
clock = time.process_time if cpu else time.perf_counter
job = Job(model, recipe, Path("out"), eval_windows=windows, prompts=PROMPTS)
begun = time.process_time() if cpu else time.time() - psutil.Process().create_time()
found = forecast(job, clock=clock).to_dict()
print(json.dumps({**found, "seconds": begun + found["seconds"], "libraries": begun}))
"""


def main(
    recipe: Annotated[list[str] | None, typer.Option(help="Repeatable.")] = None,
    nsamples: int = 4,
    seqlen: int = 512,
    windows: int = 4,
    random: Annotated[bool, typer.Option(help="1.1 billion random weights.")] = False,
    cpu: Annotated[bool, typer.Option(help="Compare processor time.")] = False,
) -> None:
    table = Table("recipe", "foreseen", "took", "ratio", "memory foreseen", "took", "ratio")
    kept = True
    with tempfile.TemporaryDirectory() as place:
        model = "smollm2-135m"
        if random:
            model = str(Path(place) / "random")
            make_checkpoint(Path(model), tiny_llama())
        for name in recipe or ["fast", "balanced"]:
            settings = {"calibration": "builtin", "nsamples": nsamples, "seqlen": seqlen}
            asked = json.dumps([model, name, settings, windows, cpu])
            found = json.loads(run([sys.executable, "-c", FORESEEN, asked], place)[0])
            took, memory = prune(model, name, settings, windows, place, cpu)
            ratios = (found["seconds"] / took, found["memory_bytes"] / memory)
            table.add_row(
                name, f"{found['seconds']:.0f} s", f"{took:.0f} s", f"{ratios[0]:.2f}",
                f"{found['memory_bytes'] / 1e9:.2f} GB", f"{memory / 1e9:.2f} GB",
                f"{ratios[1]:.2f}",
            )  # fmt: skip
            console.say(json.dumps(found["seconds_of"]))
            limits = zip(ratios, (TIME, MEMORY), strict=True)
            kept = kept and all(1 / most <= ratio <= most for ratio, most in limits)
    console.out.print(table)
    console.say("Within the limits." if kept else "Outside the limits.")
    raise typer.Exit(0 if kept else 1)


def prune(
    model: str, name: str, settings: dict[str, object], windows: int, place: str, cpu: bool
) -> tuple[float, int]:
    """Seconds and bytes of a run, libraries and all."""
    options = [f"--{key}={value}" for key, value in settings.items()]
    options += [f"--recipe={name}", f"--eval-windows={windows}", "--output=out", "--force"]
    command = [sys.executable, "-m", "symprune", "prune", "--model", model, *options]
    _, seconds, worked, memory = run(command, place)
    return (worked if cpu else seconds), memory


def run(command: list[str], place: str) -> tuple[str, float, float, int]:
    """What a command printed, its seconds by the clock and of the processor, and its peak."""
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=place) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SympruneError(f"{' '.join(command[:4])} ... failed.")
    seconds = time.perf_counter() - begun
    scale = 1 if sys.platform == "darwin" else 1024
    return printed, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * scale


if __name__ == "__main__":
    console.run(lambda: typer.run(main))
