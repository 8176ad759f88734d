"""What a comparison came to, in one sentence, and what can be done next: from its record alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from symprune.eval.comparison import Row, perplexities
from symprune.eval.verdict import change, gone
from symprune.validation import is_number

MODELS = ("dense", "pruned", "packed", "GGUF")  # what a row is of that other commands can load
ALIKE = 0.02  # sizes and speeds that differ by less are equal
STEPS = 3


def verdict(record: Mapping[str, Any]) -> str:
    """Of two, what the second is beside the first; of more, which is the best at what."""
    rows: Sequence[Row] = record["models"]
    scores = _scores(record)
    if len(rows) == 2:
        parts = _beside(rows[0], rows[1], scores)
        return f"{rows[1]['label']} beside {rows[0]['label']}: {', '.join(parts)}." if parts else ""
    return _best(rows, scores)


def _scores(record: Mapping[str, Any]) -> list[float | None]:
    """The perplexity of each on the text that most were measured on, where it can be compared."""
    rows = record["models"]
    known = perplexities(rows) if _share_a_tokenizer(record) else {}
    none: list[float | None] = [None] * len(rows)
    return max(known.values(), key=lambda row: len(row) - row.count(None), default=none)


def _beside(first: Row, other: Row, scores: Sequence[float | None]) -> list[str]:
    parts = []
    if is_number(other.get("sparsity")) and other["sparsity"] > 0:
        parts.append(gone(other["sparsity"]))
    before, after = scores
    if before is not None and after is not None:
        parts.append(f"perplexity {change(before, after)}")
    parts += _ratios(first, other)
    return parts


def _ratios(first: Row, other: Row) -> list[str]:
    """Size and speed beside another's."""
    parts = []
    share = _ratio(other.get("weight_bytes"), first.get("weight_bytes"))
    if share is not None:
        parts.append("as large" if abs(share - 1) <= ALIKE else f"{100 * share:.3g} % of the size")
    times = _ratio(_speed(other), _speed(first))
    if times is not None:
        alike = abs(times - 1) <= ALIKE
        parts.append("decoding as fast" if alike else f"decoding {times:.2g} times as fast")
    return parts


def _best(rows: Sequence[Row], scores: Sequence[float | None]) -> str:
    parts = []
    known = [(score, place) for place, score in enumerate(scores) if score is not None]
    best = min(known)[1] if len(known) > 1 else None
    if best is not None:
        parts.append(f"{rows[best]['label']} has the lowest perplexity, {min(known)[0]:.1f}")
    titles: dict[int, list[str]] = {}
    for title, worth in (("smallest", _smallness), ("fastest", _speed)):
        ranked = [(worth(row), place) for place, row in enumerate(rows) if worth(row) is not None]
        if len(ranked) > 1:
            titles.setdefault(max(ranked)[1], []).append(title)
    for place, won in titles.items():
        said = f"{rows[place]['label']} is the {' and the '.join(won)}"
        details = [] if best in (None, place) else _beside_best(rows, scores, best, place)
        parts.append(f"{said} ({', '.join(details)})" if details else said)
    return f"Of {len(rows)}, {'; '.join(parts)}." if parts else ""


def _beside_best(
    rows: Sequence[Row], scores: Sequence[float | None], best: int | None, place: int
) -> list[str]:
    assert best is not None
    before, after = scores[best], scores[place]
    lost = [] if before is None or after is None else [f"perplexity {change(before, after)}"]
    return [*_ratios(rows[best], rows[place]), *lost]


def _smallness(row: Row) -> float | None:
    size = row.get("weight_bytes")
    return -float(size) if is_number(size) else None


def _speed(row: Row) -> float | None:
    found = row.get("speed")
    speed = found.get("decode_tokens_per_second") if isinstance(found, Mapping) else None
    return float(speed) if is_number(speed) else None


def _ratio(mine: Any, theirs: Any) -> float | None:
    return mine / theirs if is_number(mine) and is_number(theirs) and theirs > 0 else None


def next_steps(record: Mapping[str, Any], has_page: bool = False) -> list[tuple[str, str]]:
    """Commands that go on from a comparison, and what each is for."""
    rows: Sequence[Row] = record["models"]
    given = " ".join(shlex.quote(row["given"]) for row in rows)
    models = [row for row in rows if row["what"] in MODELS]
    steps = []
    if not has_page:
        steps.append((f"symprune compare {given} --html compare.html", "all of it as a page"))
    if models and not any(_speed(row) for row in rows):
        named = " ".join(shlex.quote(row["given"]) for row in models)
        steps.append((f"symprune bench {named}", "speed and memory"))
    dense = next((row for row in models if row["what"] == "dense"), None)
    changed = next((row for row in models if row["what"] in ("pruned", "packed")), None)
    if dense is not None and changed is not None and _share_a_tokenizer(record):
        command = f"symprune eval --model {_name(changed)} --against {_name(dense)}"
        steps.append((command, "how far its predictions are"))
    if changed is not None and not any(row.get("tasks") for row in rows):
        command = f"symprune eval --model {_name(changed)} --tasks default"
        steps.append((command, "zero-shot accuracy"))
    return steps[:STEPS]


def _name(row: Row) -> str:
    """A model without the type that it was given."""
    return shlex.quote(str(row.get("name", row["given"])))


def _share_a_tokenizer(record: Mapping[str, Any]) -> bool:
    count = record.get("tokenizers")
    return not (is_number(count) and count > 1)
