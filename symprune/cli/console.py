"""What a person sees while work goes on: one line of what is happening, bars, and errors.

No text is markup here: names and sentences are shown as they are. What is to have a style is a
`rich.text.Text`.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
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

from symprune.errors import Interrupted, SympruneError

out = Console(markup=False, emoji=False)
err = Console(stderr=True, markup=False, emoji=False)

DEBUG = "--debug"
INTERRUPTED = 130  # the shell's exit code of what Ctrl-C ended

STAGES = {
    "embed": "embedding",
    "collect": "measuring",
    "permute": "looking at the dense model",
    "mask": "masking",
    "reconstruct": "reconstructing",
    "advance": "passing on",
    "allocate": "looking at the dense model",
    "try": "trying allocations",
}


def run(command: Callable[[], object]) -> None:
    """Run a command. What it cannot do is one sentence and exit code 2, what nobody foresaw one
    sentence and exit code 1; --debug, anywhere behind the command, shows where it happened."""
    debug = take_debug(sys.argv)
    try:
        _run_to_the_end(command)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            complain("Interrupted.")
        raise
    except Exception as error:
        if debug:
            traceback.print_exception(error, file=sys.stderr)
        complain(describe(error, debug))
        known = isinstance(error, SympruneError)
        sys.exit(INTERRUPTED if isinstance(error, Interrupted) else 2 if known else 1)


def _run_to_the_end(command: Callable[[], object]) -> None:
    """With all that was printed where it should be: a full disk shows when that is written out."""
    try:
        command()
    finally:
        try:
            if sys.stdout is not None:  # as it is where a shell closed it
                sys.stdout.flush()
        except OSError as error:
            # Python would try again at its end, and fail with words of its own.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if error.errno == errno.EPIPE:  # whoever read it has had enough
                sys.exit(1)
            raise


def take_debug(arguments: list[str]) -> bool:
    """Whether --debug is among the options; it is taken out, since every command has it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != DEBUG]
    found = len(kept) < end
    arguments[:end] = kept
    return found


def describe(error: Exception, debug: bool = False) -> str:
    """The sentence for an error, foreseen or not."""
    if isinstance(error, SympruneError):
        return str(error)
    said = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"The disk is full: {error.filename or 'what is printed'} could not be written"
    elif isinstance(error, MemoryError) or _tells_of_memory(error):
        what = f"There is not enough memory ({said or type(error).__name__})"
    else:
        what = f"Something unexpected happened: {type(error).__name__}{f': {said}' if said else ''}"
    return f"{what}." if debug else f"{what}; pass {DEBUG} to see where."


def _tells_of_memory(error: Exception) -> bool:
    told = ("can't allocate memory", "Cannot allocate memory", "out of memory")
    return type(error).__name__ == "OutOfMemoryError" or any(each in str(error) for each in told)


def complain(sentence: str) -> None:
    """Why a command ends here."""
    said = Text.assemble(("Error:", "bold red"), " ", strip_controls(sentence))
    err.print(said, highlight=False, soft_wrap=True)


def strip_controls(text: str) -> str:
    """Text without what would steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


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
        self.progress.console.print(Text(strip_controls(message), style="dim"))

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
        inside = 0.5 if stage in ("mask", "reconstruct", "advance") else 0.0
        if stage in ("collect", "reconstruct", "advance"):
            inside += 0.5 * done / max(total, 1)
        # Where blocks are trained, hardly anything is left to do behind that.
        so_far = next(task.completed for task in self.progress.tasks if task.id == self.blocks)
        self.progress.update(self.blocks, completed=max(so_far, block + inside), description=where)

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
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=5 if narrow() else 30),
        _WholeSteps(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}", style="dim", markup=False),
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
    say("Saved to ", (str(place), "bold"))


def say(*parts: str | tuple[str, str]) -> None:
    """A line made of text, and of text with a style."""
    plain = [
        strip_controls(p) if isinstance(p, str) else (strip_controls(p[0]), p[1]) for p in parts
    ]
    out.print(Text.assemble(*plain), highlight=False, soft_wrap=True)


def write(text: str) -> None:
    """Text of a user or a model, as it is but for what would steer the terminal."""
    out.file.write(strip_controls(text))
    out.file.flush()


def notes(messages: Iterable[str]) -> None:
    """What the user should know about a result."""
    for message in messages:
        out.print(Text.assemble(("Note:", "yellow"), " ", strip_controls(message)), highlight=False)


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
