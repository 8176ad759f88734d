"""What a person sees while work goes on: one line of what is happening, bars, and errors."""

from __future__ import annotations

import os
import socket
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from symprune.errors import SympruneError

out = Console()
err = Console(stderr=True)

STAGES = {
    "embed": "embedding",
    "collect": "measuring",
    "mask": "masking",
    "advance": "passing on",
    "allocate": "looking at the dense model",
}


def run(command: Callable[[], object]) -> None:
    """Run a command; what it cannot do is one sentence and exit code 2."""
    try:
        command()
    except SympruneError as error:
        said = f"[bold red]Error:[/bold red] {escape(str(error))}"
        err.print(said, highlight=False, soft_wrap=True)
        sys.exit(2)


class Display:
    """Bars for blocks and evaluation windows; plain lines where there is no terminal."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.blocks: Any = None
        self.windows: Any = None
        self.cells: Any = None

    def tell(self, message: str) -> None:
        if self.progress.disable:
            return
        self.progress.console.print(Text(message, style="dim"))

    def show(self, figures: dict[str, Any]) -> None:
        """A step of a run, with its speed and the memory it takes."""
        names = ("stage", "block", "blocks", "done", "of", "layer")
        stage, block, blocks, done, total, layer = (figures[name] for name in names)
        self.watch(stage, block - 1, blocks, done, total, layer)
        speed = figures["tokens_per_second"]
        held, most = (figures[name] / 1e9 for name in ("memory_bytes", "peak_memory_bytes"))
        unit, memory = "tokens/s", f"{held:.2f} GB, peak {most:.2f} GB"
        if narrow():
            unit, memory = "tok/s", f"{held:.1f}/{most:.1f} GB"
        text = f"{speed:,.0f} {unit} " if speed else ""
        self.progress.update(self.blocks, figures=text + memory)

    def watch(
        self, stage: str, block: int, blocks: int, done: int, total: int, layer: str = ""
    ) -> None:
        if self.blocks is None:
            self.blocks = self.progress.add_task("pruning", total=blocks, figures="")
        if stage == "done":
            self.progress.update(self.blocks, completed=block + 1)
            return
        where = f"block {block + 1}: {STAGES[stage]}" if stage != "embed" else STAGES[stage]
        if layer and not narrow():
            where += f" {'.'.join(layer.removesuffix('.weight').split('.')[-2:])}"
        share = {"collect": 0.0, "mask": 0.5, "advance": 0.5}.get(stage, 0.0)
        inside = share + 0.5 * done / max(total, 1) if stage in ("collect", "advance") else share
        self.progress.update(self.blocks, completed=block + inside, description=where)

    def begin(self, done: int, total: int, description: str) -> None:
        """A sweep comes to its next cell; the bar of blocks starts over."""
        if self.cells is None:
            self.cells = self.progress.add_task("cells", total=total, figures="")
        self.progress.update(self.cells, completed=done, description=description or "cells")
        if self.blocks is not None:
            self.progress.remove_task(self.blocks)
            self.blocks = None

    def watch_eval(self, done: int, total: int) -> None:
        if self.windows is None:
            self.windows = self.progress.add_task("perplexity", total=total, figures="")
        self.progress.update(self.windows, completed=done)
        if done == total:
            self.progress.remove_task(self.windows)
            self.windows = None


def narrow() -> bool:
    """Whether a line has no room for everything."""
    return err.width < 110


@contextmanager
def display(speaking: bool = True) -> Iterator[Display]:
    """A live display for the length of a command; silent in all processes but one."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=5 if narrow() else 30),
        _WholeSteps(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[figures]}[/dim]"),
        console=err,
        disable=not speaking,
    )
    with progress:
        yield Display(progress)


class _WholeSteps(ProgressColumn):
    """`3/30`, although the bar also moves inside a step."""

    def render(self, task: Task) -> Text:
        return Text(f"{int(task.completed)}/{int(task.total or 0)}", style="progress.download")


def say_saved(place: object) -> None:
    """Where a result is."""
    out.print(f"Saved to [bold]{escape(str(place))}[/bold]", highlight=False, soft_wrap=True)


def write(text: str) -> None:
    """Text of a user or a model, as it is but for what would steer the terminal."""
    plain = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
    out.file.write(plain)
    out.file.flush()


def notes(messages: Iterable[str]) -> None:
    """What the user should know about a result."""
    for message in messages:
        out.print(f"[yellow]Note:[/yellow] {escape(message)}", highlight=False)


def prepare_libraries() -> None:
    """Before transformers and datasets are imported: keep their bars and advice out of the way of
    ours, and spare the user minutes of retries where there is no network."""
    mind_network()
    import datasets
    from huggingface_hub.utils import logging as hub_logging
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    hub_logging.set_verbosity_error()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf.tqdm = lambda items, **_: items  # the one bar that has no switch
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()


def mind_network() -> None:
    """Tell libraries that have not been imported yet that there is no network, if so."""
    if not online():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def online() -> bool:
    """Whether the hub's name resolves; behind a proxy that is the proxy's business."""
    if any(name.lower() in ("https_proxy", "all_proxy") for name in os.environ):
        return True
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.getaddrinfo(hub.hostname, hub.port or 443)
    except OSError:
        return False
    return True
