"""The loggers of a run, as far as they work.

A run is worth more than its pictures: what a logger cannot do is said once, and the run goes on
without that logger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from symprune.errors import SympruneError
from symprune.tracking.loggers import MAKERS, Logger
from symprune.validation import is_number

ALL, NONE = "all", "none"


class Tracker:
    """All loggers of a run, as far as they work."""

    def __init__(
        self,
        names: Iterable[str],
        run: str,
        settings: Mapping[str, Any],
        complain: Callable[[str], None],
    ) -> None:
        self._complain = complain
        self._loggers: list[Logger] = []
        for name in names:
            try:
                self._loggers.append(MAKERS[name](run, settings))
            except Exception as error:
                self._give_up(MAKERS[name].title, error)

    @property
    def places(self) -> list[str]:
        """A sentence for each: where its figures are."""
        return [f"{logger.title} logs to {logger.where}" for logger in self._loggers]

    def add(self, axis: str, step: int, figures: Mapping[str, Any], label: str = "") -> None:
        """Figures at a step of an axis (`block`, `cell`, `round`); what is no number is left out.
        label: what that step is."""
        numbers = {name: float(value) for name, value in figures.items() if is_number(value)}
        self._each(lambda logger: logger.add(axis, step, numbers, label))

    def note(self, name: str, text: str) -> None:
        """Words about the run."""
        self._each(lambda logger: logger.note(name, text))

    def close(self, failed: bool = False) -> None:
        self._each(lambda logger: logger.close(failed))
        self._loggers.clear()

    def _each(self, do: Callable[[Logger], None]) -> None:
        for logger in list(self._loggers):
            try:
                do(logger)
            except Exception as error:
                self._loggers.remove(logger)
                self._give_up(logger.title, error)

    def _give_up(self, title: str, error: Exception) -> None:
        said = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        self._complain(f"{title} is not logged to ({said}); the run goes on without it.")


def choose(asked: Iterable[str]) -> list[str]:
    """The loggers that were asked for, each once; fails for one that is not installed."""
    given = [name.strip() for text in asked for name in text.split(",")]
    there = [name for name in MAKERS if is_installed(name)]
    found: list[str] = []
    for name in given:
        if name == ALL:
            if not there:
                raise SympruneError(
                    "--report-to all finds nothing to report to: install tensorboard or wandb."
                )
            found += there
        elif name != NONE:
            if name not in MAKERS:
                raise SympruneError(
                    f"--report-to is tensorboard, wandb, all or none, not {name!r}."
                )
            if name not in there:
                raise SympruneError(
                    f"--report-to {name} needs a package that is not installed: "
                    f"pip install {name}, or leave it out."
                )
            found.append(name)
    return list(dict.fromkeys(found))


def is_installed(name: str) -> bool:
    return find_spec(name) is not None


@contextmanager
def tracked(
    names: Iterable[str],
    run: str,
    settings: Mapping[str, Any],
    tell: Callable[[str], None],
    warn: Callable[[str], None],
) -> Iterator[Tracker]:
    """The loggers of a run, for its length: told where they log, warned of what they cannot do."""
    tracker = Tracker(names, run, settings, warn)
    for place in tracker.places:
        tell(place)
    try:
        yield tracker
    except BaseException:
        tracker.close(failed=True)
        raise
    tracker.close()
