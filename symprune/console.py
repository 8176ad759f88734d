"""What a person sees while work goes on: one line of what is happening, bars, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

out = Console()
err = Console(stderr=True)

STAGES = {"embed": "embedding", "collect": "measuring", "mask": "masking", "advance": "passing on"}


class Display:
    """Bars for blocks and evaluation windows; plain lines where there is no terminal."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.blocks: Any = None
        self.windows: Any = None

    def tell(self, message: str) -> None:
        self.progress.console.print(f"[dim]{message}[/dim]", highlight=False)

    def watch(self, stage: str, block: int, blocks: int, done: int, total: int) -> None:
        if self.blocks is None:
            self.blocks = self.progress.add_task("pruning", total=blocks)
        if stage == "done":
            self.progress.update(self.blocks, completed=block + 1)
            return
        where = f"block {block + 1}: {STAGES[stage]}" if stage != "embed" else STAGES[stage]
        share = {"collect": 0.0, "mask": 0.5, "advance": 0.5}.get(stage, 0.0)
        inside = share + 0.5 * done / max(total, 1) if stage in ("collect", "advance") else share
        self.progress.update(self.blocks, completed=block + inside, description=where)

    def watch_eval(self, done: int, total: int) -> None:
        if self.windows is None:
            self.windows = self.progress.add_task("perplexity", total=total)
        self.progress.update(self.windows, completed=done)
        if done == total:
            self.progress.remove_task(self.windows)
            self.windows = None


@contextmanager
def display() -> Iterator[Display]:
    """A live display for the length of a command."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        _WholeSteps(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=err,
    )
    with progress:
        yield Display(progress)


class _WholeSteps(MofNCompleteColumn):
    """`3/30`, although the bar also moves inside a step."""


def quiet_libraries() -> None:
    """Keep transformers' and datasets' own bars and advice out of the way of ours."""
    import datasets
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
