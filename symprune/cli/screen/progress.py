"""What is going on, as a command goes on: a spinner and bars where a person watches, plain lines
where nobody does."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.spinner import Spinner
from rich.text import Text

from symprune.cli.screen.fitted_table import wrap
from symprune.cli.screen.terminal import strip_controls

WIDE, LITTLE = 110, 60  # columns of a terminal with room for everything, and for hardly anything
TENTHS = 10  # lines for steps that are too many for one each
STAGES = {
    "embed": "embedding",
    "collect": "measuring",
    "permute": "ordering",
    "mask": "masking",
    "reconstruct": "reconstructing",
    "advance": "passing on",
    "allocate": "looking",
    "try": "trying",
}


class Display:
    """What is told and watched while a command runs."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def tell(self, message: str) -> None:
        """What is done next, or what the user should know now."""

    def show(self, figures: dict[str, Any]) -> None:
        """A step of a run, with its speed and the memory it takes."""
        names = ("stage", "block", "blocks", "done", "of", "layer")
        stage, block, blocks, done, total, layer = (figures[name] for name in names)
        self.watch(stage, block - 1, blocks, done, total, layer)

    def watch(
        self, stage: str, block: int, blocks: int, done: int, total: int, layer: str = ""
    ) -> None:
        """A step of a walk."""

    def begin(self, done: int, total: int, description: str) -> None:
        """A sweep comes to its next cell, or work of some pieces to the next."""

    def watch_eval(self, done: int, total: int) -> None:
        """Windows of text are predicted."""

    def count(self, what: str, done: int, total: int, now: str) -> None:
        """So many of a kind are done; now: a figure to watch."""


class Silent(Display):
    """Nothing is said."""


class Live(Display):
    """A spinner for what has no steps yet, then bars for blocks and windows."""

    def __init__(self, console: Console, verbose: bool = False) -> None:
        self.progress = _Bars(*_columns(console.width), console=console)
        self.verbose = verbose
        self.narrow, self.little = console.width < WIDE, console.width < LITTLE
        self.blocks: TaskID | None = None
        self.windows: TaskID | None = None
        self.cells: TaskID | None = None
        self.counted: TaskID | None = None

    def __enter__(self) -> Live:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._settle()
        self.progress.stop()

    def tell(self, message: str) -> None:
        self._settle()
        self.progress.doing = strip_controls(message)

    def _settle(self) -> None:
        """What was told last is done, and stays as a line."""
        if self.progress.doing:
            self._print(self.progress.doing)
            self.progress.doing = ""

    def _print(self, line: str) -> None:
        said = Text(wrap(line, self.progress.console.width), style="dim")
        self.progress.console.print(said, highlight=False, soft_wrap=True)

    def show(self, figures: dict[str, Any]) -> None:
        super().show(figures)
        if self.blocks is not None:
            self.progress.update(self.blocks, figures=_describe_figures(figures, self.narrow))

    def watch(
        self, stage: str, block: int, blocks: int, done: int, total: int, layer: str = ""
    ) -> None:
        self._settle()
        if self.blocks is None:
            self.blocks = self.progress.add_task("pruning", total=blocks, figures="")
        if stage == "done":
            self.progress.update(self.blocks, completed=block + 1)
            return
        where = f"block {block + 1}: {STAGES[stage]}" if stage != "embed" else STAGES[stage]
        if layer and self.verbose:
            self._print(f"{where} {layer}")
        if self.little:
            where = STAGES[stage]
        if layer and not self.narrow:
            where += f" {_short(layer)}"
        inside = 0.5 if stage in ("mask", "reconstruct", "advance") else 0.0
        if stage in ("collect", "reconstruct", "advance"):
            inside += 0.5 * done / max(total, 1)
        # Where blocks are trained, hardly anything is left to do behind that.
        so_far = next(task.completed for task in self.progress.tasks if task.id == self.blocks)
        self.progress.update(self.blocks, completed=max(so_far, block + inside), description=where)

    def begin(self, done: int, total: int, description: str) -> None:
        self._settle()
        if self.cells is None:
            self.cells = self.progress.add_task("cells", total=total, figures="")
        named = strip_controls(description) or "cells"
        if self.narrow and len(named) > 16 and done < total:  # it would take the bar's room
            self._print(f"{done + 1} of {total}: {named}")
            named = "cells"
        self.progress.update(self.cells, completed=done, description=named)
        if self.blocks is not None:
            self.progress.remove_task(self.blocks)
            self.blocks = None

    def watch_eval(self, done: int, total: int) -> None:
        self._settle()
        if self.windows is None:
            self.windows = self.progress.add_task("perplexity", total=total, figures="")
        self.progress.update(self.windows, completed=done)
        if done == total:
            self.progress.remove_task(self.windows)
            self.windows = None

    def count(self, what: str, done: int, total: int, now: str) -> None:
        self._settle()
        if self.counted is None:
            self.counted = self.progress.add_task(what, total=total, figures="")
        self.progress.update(self.counted, completed=done, figures=now)


class Lines(Display):
    """A plain line for each block, cell or measurement that is done: for logs and pipes."""

    def __init__(self, console: Console, verbose: bool = False) -> None:
        self.console = console
        self.verbose = verbose
        self.begun: tuple[float, int] | None = None
        self._described = ""
        self._tenths = -1

    def tell(self, message: str) -> None:
        self._print(message)

    def show(self, figures: dict[str, Any]) -> None:
        if figures["stage"] != "done":
            super().show(figures)
            return
        done, blocks, left = (figures[name] for name in ("block", "blocks", "seconds_left"))
        parts = [_describe_figures(figures, narrow=False)]
        parts += [f"{say_time(left)} left"] if left else []
        self._print(f"block {done} of {blocks} done: {', '.join(parts)}")

    def watch(
        self, stage: str, block: int, blocks: int, done: int, total: int, layer: str = ""
    ) -> None:
        now = time.monotonic()
        if self.begun is None:
            self.begun = (now, block)
        if stage == "done":
            since, first = self.begun
            left = (now - since) / (block + 1 - first) * (blocks - block - 1)
            rest = f", {say_time(left)} left" if left else ""
            self._print(f"block {block + 1} of {blocks} done{rest}")
        elif layer and self.verbose:
            self._print(f"block {block + 1}: {STAGES[stage]} {layer}")

    def begin(self, done: int, total: int, description: str) -> None:
        self.begun = None
        if done == total:
            self._print(f"{total} of {total} done")
        elif description != self._described:
            self._print(f"{done + 1} of {total}: {description}")
        self._described = description

    def watch_eval(self, done: int, total: int) -> None:
        if done == total:
            self._print(f"perplexity: {total} of {total} windows")

    def count(self, what: str, done: int, total: int, now: str) -> None:
        if done == total or done * TENTHS // total > self._tenths:
            self._tenths = done * TENTHS // total
            self._print(f"{what}: {done} of {total}" + (f", {now}" if now else ""))

    def _print(self, line: str) -> None:
        self.console.print(Text(strip_controls(line)), highlight=False, soft_wrap=True)


def say_time(seconds: float) -> str:
    """`4:10`, or `2:04:10` from an hour on."""
    whole = round(seconds)
    minutes, hours = whole // 60 % 60, whole // 3600
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


class _Bars(Progress):
    """Bars, and above them what is being done that has no steps."""

    doing = ""
    _spinner: Spinner | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.doing:
            self._spinner = self._spinner or Spinner("dots")
            self._spinner.update(text=Text(self.doing, style="dim"))
            yield self._spinner
        if self.tasks:
            yield self.make_tasks_table(self.tasks)


class _WholeSteps(ProgressColumn):
    """`3/30`, although the bar also moves inside a step."""

    def render(self, task: Task) -> Text:
        return Text(f"{int(task.completed)}/{int(task.total or 0)}", style="progress.download")


def _columns(width: int) -> list[ProgressColumn]:
    """As much as there is room for; a bar always, and how long yet."""
    name = TextColumn("{task.description}", markup=False)
    steps, figures = _WholeSteps(), TextColumn("{task.fields[figures]}", style="dim", markup=False)
    if width < LITTLE:
        return [name, BarColumn(bar_width=7), steps, TimeRemainingColumn(compact=True)]
    if width < WIDE:
        left = TimeRemainingColumn(compact=True)
        return [SpinnerColumn(), name, BarColumn(bar_width=10), steps, left, figures]
    elapsed, left = TimeElapsedColumn(), TimeRemainingColumn()
    return [SpinnerColumn(), name, BarColumn(bar_width=30), steps, elapsed, left, figures]


def _describe_figures(figures: dict[str, Any], narrow: bool) -> str:
    speed = figures["tokens_per_second"]
    held, most = (figures[name] / 1e9 for name in ("memory_bytes", "peak_memory_bytes"))
    if narrow:
        return (f"{speed:,.0f} tok/s " if speed else "") + f"{held:.1f}/{most:.1f} GB"
    return (f"{speed:,.0f} tokens/s, " if speed else "") + f"{held:.2f} GB, peak {most:.2f} GB"


def _short(layer: str) -> str:
    return ".".join(layer.removesuffix(".weight").split(".")[-2:])
