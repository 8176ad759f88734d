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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from rich.text import Text

from symprune.cli.screen.progress import Display, Lines, Live, Silent
from symprune.cli.screen.terminal import Paper, loudness, strip_controls
from symprune.errors import Interrupted, SympruneError

out = Paper(markup=False, emoji=False)
err = Paper(stderr=True, markup=False, emoji=False)

DEBUG, QUIET, VERBOSE = "--debug", "--quiet", "--verbose"
INTERRUPTED = 130  # the shell's exit code of what Ctrl-C ended


def run(command: Callable[[], object]) -> None:
    """Run a command. What it cannot do is one sentence and exit code 2, what nobody foresaw one
    sentence and exit code 1; --debug, anywhere behind the command, shows where it happened."""
    debug = take_flag(sys.argv, DEBUG)
    quiet, verbose = (take_flag(sys.argv, flag) for flag in (QUIET, VERBOSE))
    speak(quiet, verbose)
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


def take_flag(arguments: list[str], flag: str) -> bool:
    """Whether a flag is among the options; it is taken out, since every command has it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != flag]
    found = len(kept) < end
    arguments[:end] = kept
    return found


def speak(quiet: bool = False, verbose: bool = False) -> None:
    """How much is said from now on."""
    loudness.quiet, loudness.verbose = quiet, verbose


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


@contextmanager
def display(speaking: bool = True) -> Iterator[Display]:
    """What is going on, for the length of a command: live where a person watches, else in lines;
    silent in all processes but one, and with --quiet."""
    shown: Display = Silent()
    if speaking and not loudness.quiet:
        shown = Live(err, loudness.verbose) if err.is_terminal else Lines(err, loudness.verbose)
    with shown:
        yield shown


@contextmanager
def doing(what: str) -> Iterator[None]:
    """A spinner, or a line, for something that takes a while and has no steps."""
    with display() as shown:
        shown.tell(what)
        yield


def say_saved(place: object) -> None:
    """Where a result is."""
    say("Saved to ", (str(place), "bold"))


def say(*parts: str | tuple[str, str]) -> None:
    """A line made of text, and of text with a style."""
    plain = [
        strip_controls(p) if isinstance(p, str) else (strip_controls(p[0]), p[1]) for p in parts
    ]
    out.print(Text.assemble(*plain), highlight=False, soft_wrap=True)


def warn(sentence: str) -> None:
    """What went wrong and ends nothing."""
    said = Text.assemble(("Warning:", "yellow"), " ", strip_controls(sentence))
    err.print(said, highlight=False, soft_wrap=True)


def remark(sentence: str) -> None:
    """What is good to know while a command runs; nothing with --quiet."""
    if not loudness.quiet:
        err.print(Text(strip_controls(sentence), style="dim"), highlight=False, soft_wrap=True)


def conclude(sentence: str) -> None:
    """What a result comes to."""
    if sentence:
        out.print(Text(strip_controls(sentence), style="bold"), highlight=False)


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
    if loudness.verbose:
        return
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


def hub_is_off() -> bool:
    """Whether the user has said that the hub is not to be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


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
