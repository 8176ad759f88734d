"""What a command shows of a result in words: the same prompts by several models, one sentence of
what happened, and what to do next; and what a run would take."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from symprune.cli import console
from symprune.cli import options as o

if TYPE_CHECKING:
    from symprune.jobs.estimate.forecast import Forecast

SAMPLES = "Samples"
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        "-p",
        help="A text for the models to continue; repeatable. [dim]\\[three built-in ones][/dim]",
        rich_help_panel=SAMPLES,
    ),
]
WantSamples = Annotated[
    bool,
    typer.Option(
        "--samples/--no-samples",
        help="Show the same prompts continued by each model, if it fits into memory.",
        rich_help_panel=SAMPLES,
    ),
]


@dataclass(frozen=True)
class Showing:
    """Which prompts are continued."""

    prompt: Prompts = None
    samples: WantSamples = True

    def prompts(self) -> tuple[str, ...]:
        """The built-in ones if none were typed."""
        from symprune.errors import SympruneError
        from symprune.jobs.samples import PROMPTS

        if not self.samples:
            if self.prompt:
                raise SympruneError("Give --prompt or --no-samples, not both.")
            return ()
        return tuple(self.prompt or PROMPTS)


def show_samples(record: Mapping[str, Any]) -> None:
    """The prompts of a record, and what became of each."""
    from symprune.eval import samples

    found = samples.read(record)
    if found:
        console.say(("The same prompts, continued:", "bold"))
        for each in samples.show(found, console.out.width):
            console.out.print(each, highlight=False)


def conclude(record: Mapping[str, Any]) -> None:
    """One sentence about a run, and commands that go on from it."""
    from symprune.eval.verdict import next_steps, verdict

    console.conclude(verdict(record))
    _next(next_steps(record, record["output"]))


def conclude_comparison(record: Mapping[str, Any], has_page: bool) -> None:
    """The same about several models."""
    from symprune.eval.comparison import next_steps, verdict

    console.conclude(verdict(record))
    _next(next_steps(record, has_page))


def conclude_sweep(results: list[dict[str, Any]], output: Path) -> None:
    """One sentence about the cells of a sweep, and what goes on from their file."""
    from symprune.eval.report.cells import of_results
    from symprune.eval.report.sweep import verdict
    from symprune.wording import counted

    console.conclude(verdict(of_results(results)))
    console.say(f"{counted(len(results), 'cell')} in ", (str(output), "bold"))
    page = shlex.quote(f"{output.stem}.html")
    _next([(f"symprune report {shlex.quote(str(output))} -o {page}", "pictures, and the recipes")])


def _next(steps: Sequence[tuple[str, str]]) -> None:
    if steps:
        console.say("Next:")
    for command, purpose in steps:
        console.say("  ", (command, "cyan"), f"  # {purpose}")


class Foreseen:
    """What a run takes, where it is told before it begins: said, and kept for --dry-run, with which
    the run does not go on."""

    def __init__(self, tell: Callable[[str], None], dry_run: bool) -> None:
        self.tell, self.dry_run = tell, dry_run
        self.found: Forecast | None = None

    def go_on(self, found: Forecast | None) -> bool:
        """Whether the run begins; an error where it cannot fit."""
        self.found = found
        if self.dry_run or found is None:
            return not self.dry_run
        found.check()
        for said in found.sentences():
            self.tell(said)
        return True


def show_forecast(forecast: Forecast | None, json_file: Path | None) -> None:
    """What would be done, and what it takes; exit code 2 where it cannot fit."""
    from symprune.eval import tables
    from symprune.jobs.estimate.forecast import needed

    found = needed(forecast)
    result = found.to_dict()
    console.out.print(tables.forecast(result))
    o.write_json(json_file, result)
    found.check()
