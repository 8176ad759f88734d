"""Several texts with weights: `c4*0.7 + mine.jsonl*0.3`, and which window is from which of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from symprune.errors import SympruneError

OWN = "self"
"""The source whose windows the dense model writes."""
MOST_SOURCES = 64
_PLUS = re.compile(r"\s+\+\s+")
_WEIGHT = re.compile(r"\*\s*([^\s*/]*)$")


@dataclass(frozen=True)
class Part:
    """A source, and its weight beside those of the others."""

    source: str
    weight: float = 1.0


def parse(text: str) -> tuple[Part, ...]:
    """The sources of `A*0.7 + B*0.3`, with spaces around the plus; without a weight each counts 1.
    What is a file's or folder's name as a whole is that."""
    if not text.strip():
        raise SympruneError("The calibration text has no name.")
    if _exists(text):
        return (Part(text),)
    terms = _PLUS.split(text.strip())
    if len(terms) > MOST_SOURCES:
        raise SympruneError(f"A mixture has at most {MOST_SOURCES} texts, not {len(terms)}.")
    parts = tuple(_parse_term(term, text) for term in terms)
    names = [part.source for part in parts]
    for name in names:
        if names.count(name) > 1:
            raise SympruneError(f"The mixture {text!r} names {name!r} twice; add up its weights.")
    return parts


def _parse_term(term: str, text: str) -> Part:
    found = _WEIGHT.search(term)
    if found is None or _exists(term):
        return _named(term, 1.0, text)
    try:
        weight = float(found[1])
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise SympruneError(f"The weight of {term!r} is not a number above 0.")
    return _named(term[: found.start()].rstrip(), weight, text)


def _named(source: str, weight: float, text: str) -> Part:
    if not source or source.startswith("+ ") or source.endswith(" +"):
        raise SympruneError(f"The mixture {text!r} has a text without a name.")
    return Part(source, weight)


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # longer than a name can be, or with a zero in it
        return False


def write(parts: Sequence[Part], name: Callable[[str], str]) -> str:
    """What `parse` reads, with other names for the sources."""
    if len(parts) == 1:
        return name(parts[0].source)
    return " + ".join(f"{name(part.source)}*{part.weight:.17g}" for part in parts)


def divide(count: int, parts: Sequence[Part]) -> list[int]:
    """How many of `count` windows each part gives: its share, rounded down, and what is left over
    one each to the largest remainders, the earlier part first."""
    total = math.fsum(part.weight for part in parts)
    exact = [count * (part.weight / total) for part in parts]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[: count - sum(counts)]:
        counts[index] += 1
    return counts


def arrange(counts: Sequence[int]) -> list[tuple[int, int]]:
    """An order in which the windows of all parts are spread evenly: (part, window of it)."""
    places = [(part, window) for part, count in enumerate(counts) for window in range(count)]
    return sorted(places, key=lambda place: ((place[1] + 0.5) / counts[place[0]], place))
