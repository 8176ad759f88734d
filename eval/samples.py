"""The same prompts continued by several models, out of a record, and in a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.padding import Padding
from rich.text import Text

from symprune.validation import has_kinds

Renderable = Text | Padding
WRITTEN: dict[str, type] = {"by": str, "text": str, "tokens": int, "same": int}
NARROW = 60  # columns below which a model's name has a line of its own


@dataclass(frozen=True)
class Written:
    """What a model wrote: how many tokens, and how many of them, from the first on, are those of
    the first model."""

    by: str
    text: str
    tokens: int
    same: int


@dataclass(frozen=True)
class Sample:
    """A prompt and what each model made of it."""

    prompt: str
    continuations: list[Written]


def read(record: Mapping[str, Any]) -> list[Sample]:
    """The samples of a record that are fully described."""
    found = []
    entries = record.get("samples")
    for entry in entries if isinstance(entries, list) else []:
        if not has_kinds(entry, {"prompt": str, "continuations": list}):
            continue
        written = [
            Written(**{name: each[name] for name in WRITTEN})
            for each in entry["continuations"]
            if has_kinds(each, WRITTEN)
        ]
        if written:
            found.append(Sample(entry["prompt"], written))
    return found


def tidy(text: str) -> str:
    """Without empty lines, and without what would steer a terminal."""
    plain = "".join(c for c in text if c == "\n" or unicodedata.category(c) != "Cc")
    return "\n".join(line.rstrip() for line in plain.splitlines() if line.strip())


def agreement(written: Written) -> str:
    """How far a text is the first model's."""
    if written.same >= written.tokens:
        return "the same"
    return f"the same for {written.same} of {written.tokens} tokens"


def show(samples: Sequence[Sample], width: int) -> Iterator[Renderable]:
    """Lines for a terminal of that width: a prompt, and below it what each model wrote."""
    names = [each.by for sample in samples for each in sample.continuations]
    indent = 2 if width < NARROW else min(max(map(len, names)), width // 3) + 4
    for sample in samples:
        yield Text(tidy(sample.prompt), style="bold")
        for number, each in enumerate(sample.continuations):
            text = Text(tidy(each.text).lstrip() or "(nothing)")
            if number and each.same:
                text.append(f"  [{agreement(each)}]", style="dim")
            if width < NARROW or len(each.by) > indent - 4:
                yield Padding(Text(each.by, style="cyan"), (0, 0, 0, 2))
                yield Padding(text, (0, 0, 0, min(indent, 4)))
            else:
                yield _beside(each.by, text, indent, width)
        yield Text("")


def _beside(name: str, text: Text, indent: int, width: int) -> Text:
    """A text with a name to its left, every further line indented as the first."""
    from rich.console import Console

    lines = text.wrap(Console(width=width, markup=False), max(width - indent, 10))
    shown = Text(f"  {name}", style="cyan")
    shown.append(" " * (indent - 2 - len(name)))
    for number, line in enumerate(lines):
        if number:
            shown.append("\n" + " " * indent)
        shown.append(line)
    return shown
