"""The finished cells of a sweep: read, named by what sets them apart, averaged over their seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symprune.errors import SympruneError
from symprune.validation import has_kinds, is_number, parse_json

STEPS = ("refine", "update", "allocate", "values", "reconstruct")
"""What is done after a criterion, in order; only a refinement is named where all have it."""
AMOUNT = ("sparsity", "pattern", "seed")
"""What of a recipe does not belong to its series: where on the axis it lies, and which draw."""


@dataclass(frozen=True)
class Cell:
    """One line of the file."""

    recipe: Mapping[str, Any]
    settings: Mapping[str, Any]
    description: str
    model: str
    data: str
    windows: int | None
    seqlen: int | None
    dense: float | None
    perplexity: float
    sparsity: float
    seconds: float | None
    relative_error: float | None
    held_out_error: float | None
    bits: float | None

    @property
    def pattern(self) -> str | None:
        pattern = self.recipe.get("pattern")
        return None if pattern is None else str(pattern)

    @property
    def asked(self) -> float:
        """The sparsity the recipe asks for; a pattern's is the one it came to."""
        asked = self.recipe.get("sparsity")
        return float(asked) if is_number(asked) else self.sparsity

    @property
    def amount(self) -> str:
        return self.pattern or f"{100 * self.asked:g} %"

    @property
    def panel(self) -> tuple[Any, ...]:
        """Perplexities are compared only within one model and one text cut one way."""
        return (self.model, self.data, self.windows, self.seqlen)

    @property
    def series(self) -> str:
        return json.dumps(self.settings, sort_keys=True, default=str)


@dataclass(frozen=True)
class Group:
    """Cells that differ only in their seed."""

    label: str
    cells: Sequence[Cell]

    @property
    def first(self) -> Cell:
        return self.cells[0]

    @property
    def perplexity(self) -> float:
        return statistics.fmean(cell.perplexity for cell in self.cells)

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds (n - 1 in the denominator); 0 for one seed."""
        return self._deviation([cell.perplexity for cell in self.cells])

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the cells that have it."""
        values = [getattr(cell, name) for cell in self.cells if getattr(cell, name) is not None]
        return statistics.fmean(values) if values else None

    @staticmethod
    def _deviation(values: Sequence[float]) -> float:
        finite = all(abs(value) < float("inf") for value in values)
        return statistics.stdev(values) if len(values) > 1 and finite else 0.0


def read(path: Path) -> list[Cell]:
    """The cells of a .jsonl file; of two with one key the later counts."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SympruneError(f"{path} is neither a run nor a sweep: it is not text.") from error
    except OSError as error:
        raise SympruneError(f"Cannot read {path}: {error.strerror}.") from error
    found: dict[str, Cell] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = parse_json(line)
        except ValueError as error:
            if not text.endswith("\n") and line == text.splitlines()[-1]:
                continue  # a cell that is being written, or was cut short and will be done again
            raise SympruneError(f"Line {number} of {path} is not JSON.") from error
        cell = _cell(values, f"Line {number} of {path}")
        found[str(values.get("key", number))] = cell
    if not found:
        raise SympruneError(f"The sweep {path} has no finished cells yet.")
    return list(found.values())


def of_results(results: Iterable[Any]) -> list[Cell]:
    """The cells of results that are in memory."""
    return [_cell(values, "A result") for values in results]


def _cell(values: Any, where: str) -> Cell:
    if not isinstance(values, dict):
        raise SympruneError(f"{where} is not a finished cell of a sweep.")
    recipe = values.get("recipe")
    if not has_kinds(recipe, {"method": str}):
        raise SympruneError(f"{where} is not a finished cell of a sweep: it has no recipe.")
    for name in ("perplexity", "sparsity"):
        if not is_number(values.get(name)):
            raise SympruneError(f"{where} is not a finished cell of a sweep: it has no {name}.")

    def number(name: str) -> float | None:
        return float(values[name]) if is_number(values.get(name)) else None

    def count(name: str) -> int | None:
        return values[name] if isinstance(values.get(name), int) else None

    return Cell(
        recipe=recipe,
        settings=_flat({k: v for k, v in recipe.items() if k not in AMOUNT}),
        description=str(values.get("description", recipe["method"])),
        model=str(values.get("model", "model")),
        data=str(values.get("data", "held-out text")),
        windows=count("windows"),
        seqlen=count("seqlen"),
        dense=number("dense"),
        perplexity=float(values["perplexity"]),
        sparsity=float(values["sparsity"]),
        seconds=number("seconds"),
        relative_error=number("relative_error"),
        held_out_error=number("held_out_error"),
        bits=number("bits_per_weight"),
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"params": {"alpha": 1}}` as `{"params.alpha": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = value
    return flat


def groups(cells: Sequence[Cell]) -> list[Group]:
    """Cells that differ only in their seed together, in the order they were finished."""
    names = labels(cells)
    together: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        together.setdefault((cell.series, cell.amount), []).append(cell)
    return [Group(names[series], members) for (series, _), members in together.items()]


def labels(cells: Sequence[Cell]) -> dict[str, str]:
    """A short name for every series: method, parameters, refinement, and what else varies."""
    settings = {cell.series: cell.settings for cell in cells}
    seen: dict[str, set[str]] = {}
    for one in settings.values():
        for key, value in one.items():
            seen.setdefault(key, set()).add(str(value))
    varying = {key for key, values in seen.items() if len(values) > 1}
    steps = {name for step in STEPS for name in (step, f"{step}.name")} & seen.keys()
    # A step that some have and others do not sets them apart as well.
    varying |= {key for key in steps if any(key not in one for one in settings.values())}
    short = {series: label(one, varying) for series, one in settings.items()}
    twice = [name for name in short.values() if list(short.values()).count(name) > 1]
    return {
        series: label(settings[series], set(seen)) if name in twice else name
        for series, name in short.items()
    }


def label(settings: Mapping[str, Any], show: set[str]) -> str:
    """`ria alpha=0.5 + r2-dsnot max_cycles=100, group=layer`."""
    params = _pairs(settings, "params.", set(settings))
    text = " ".join([str(settings["method"]), *params])
    for step in STEPS:
        name = settings.get(f"{step}.name", settings.get(step))
        named = {step, f"{step}.name"}
        if name is not None and (step == "refine" or named & show):
            options = _pairs(settings, f"{step}.", show - named)
            text += " + " + " ".join([str(name), *options])
    others = {k: v for k, v in settings.items() if "." not in k and k not in ("method", *STEPS)}
    return ", ".join([text, *_pairs(others, "", show)])


def _pairs(settings: Mapping[str, Any], prefix: str, show: set[str]) -> list[str]:
    return [
        f"{key.removeprefix(prefix)}={_plain(value)}"
        for key, value in settings.items()
        if key.startswith(prefix) and key in show
    ]


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
