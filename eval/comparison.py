"""A comparison of models, out of its record: its figures by name, as a table or as lists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from symprune.errors import SympruneError
from symprune.eval.tables import percent, size
from symprune.eval.verdict import change
from symprune.validation import has_kinds, is_number

Row = Mapping[str, Any]
KIND = "compare"
NARROW = 60  # columns below which a table becomes lists
NAME, COLUMN = 30, 12  # columns for the names of figures, and at least for a model
ERRORS = {
    "relative_error": "error of a layer, calibration",
    "held_out_error": "error of a layer, held-out",
}
MODELS = ("dense", "pruned", "packed", "GGUF")  # what of a row other commands can load
STEPS = 3  # that are named at the end
DECODING = "decode_tokens_per_second"
SPEEDS = {
    DECODING: ("decoding, tokens/s", "{:.1f}".format),
    "prefill_tokens_per_second": ("prompt, tokens/s", "{:.1f}".format),
    "memory_bytes": ("memory", size),
}


def check(record: Any) -> Mapping[str, Any]:
    """A record of a comparison, if a value is one."""
    whole = has_kinds(record, {"models": list, "overlap": list, "notes": list})
    if not whole or record.get("kind") != KIND or not record["models"]:
        raise SympruneError("This is not the result of a comparison.")
    if not all(
        has_kinds(row, {"label": str, "given": str, "what": str}) for row in record["models"]
    ):
        raise SympruneError("A model of the comparison is not fully described.")
    found: Mapping[str, Any] = record
    return found


def figures(rows: Sequence[Row]) -> dict[str, list[str]]:
    """What is known of any of the models, by name: a text for each, empty where it is not."""
    found = {
        "kind": [str(row["what"]) for row in rows],
        "recipe": [_text(row, "description") for row in rows],
        "sparsity": [_number(row, "sparsity", percent) for row in rows],
        "weights on disk": [_number(row, "weight_bytes", size) for row in rows],
        "bits a weight": [_number(row, "bits_per_weight", "{:.2f}".format) for row in rows],
        **_perplexities(rows),
        **_tasks(rows),
        **{title: [mean_error(row, name) for row in rows] for name, title in ERRORS.items()},
    }
    for name, (title, text) in SPEEDS.items():
        found[title] = [_number(_mapping(row.get("speed")), name, text) for row in rows]
    return {title: texts for title, texts in found.items() if any(texts)}


def _perplexities(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Measured now, then as the runs recorded it; each on texts of its own."""
    found: dict[str, list[str]] = {}
    for place, row in enumerate(rows):
        measured = _mapping(row.get("perplexity"))
        if is_number(measured.get("perplexity")):
            title = f"perplexity, {_text_of(measured)}"
            found.setdefault(title, [""] * len(rows))[place] = f"{measured['perplexity']:.2f}"
    for place, row in enumerate(rows):
        entries = row.get("recorded")
        for entry in entries if isinstance(entries, list) else []:
            pruned = _mapping(entry).get("pruned")
            if is_number(pruned):
                title = f"recorded perplexity, {_text_of(entry)}"
                found.setdefault(title, [""] * len(rows))[place] = f"{pruned:.2f}"
    return found


def _text_of(entry: Mapping[str, Any]) -> str:
    return f"{entry.get('data')} ({entry.get('windows')} x {entry.get('seqlen')})"


def _tasks(rows: Sequence[Row]) -> dict[str, list[str]]:
    names = dict.fromkeys(name for row in rows for name in _mapping(row.get("tasks")))
    return {
        str(name): [_number(_mapping(row.get("tasks")), name, percent) for row in rows]
        for name in names
    }


def errors(row: Row, name: str) -> list[tuple[int, str, float]]:
    """(block, kind, error) of every matrix whose error a run recorded."""
    layers = row.get("layers")
    found = []
    for layer in layers if isinstance(layers, list) else []:
        error = _mapping(layer).get(name)
        if is_number(error):
            number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", str(layer.get("name")))
            found.append((int(number[1]) if number else 0, str(layer.get("kind")), error))
    return found


def errors_by_block(row: Row, name: str) -> dict[int, float]:
    """The mean over each block's matrices."""
    blocks: dict[int, list[float]] = {}
    for block, _, error in errors(row, name):
        blocks.setdefault(block, []).append(error)
    return {block: sum(values) / len(values) for block, values in sorted(blocks.items())}


def mean_error(row: Row, name: str) -> str:
    found = [error for _, _, error in errors(row, name)]
    return f"{sum(found) / len(found):.3g}" if found else ""


def error_kinds(rows: Sequence[Row]) -> tuple[str, dict[str, list[str]]]:
    """The error that most runs recorded, and its mean by kind of matrix for each model."""
    counts = {name: sum(bool(errors(row, name)) for row in rows) for name in ERRORS}
    name = max(counts, key=lambda each: counts[each])
    found: dict[str, list[str]] = {}
    for place, row in enumerate(rows):
        kinds: dict[str, list[float]] = {}
        for _, kind, error in errors(row, name):
            kinds.setdefault(kind, []).append(error)
        for kind, values in kinds.items():
            texts = found.setdefault(kind, [""] * len(rows))
            texts[place] = f"{sum(values) / len(values):.3g}"
    return ERRORS[name], found


def overlaps(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(one, other, what they have in common) of every two whose masks are known."""
    labels = [row["label"] for row in record["models"]]
    found = []
    for one, entries in enumerate(record["overlap"][: len(labels)]):
        for other, entry in enumerate(entries[:one] if isinstance(entries, list) else []):
            if has_kinds(entry, {"share": float, "by_chance": float}):
                text = f"{percent(entry['share'])} (by chance {percent(entry['by_chance'])})"
                found.append((labels[other], labels[one], text))
    return found


def show(record: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The comparison for a terminal of that width."""
    rows: list[Row] = record["models"]
    labels = [str(row["label"]) for row in rows]
    fits = width >= NARROW and NAME + len(rows) * (COLUMN + 3) <= width
    title, kinds = error_kinds(rows)
    parts = {"Side by side": figures(rows), f"{title}, by kind of matrix": kinds}
    for heading, found in parts.items():
        if found:
            yield from _table(heading, labels, found) if fits else _lists(heading, labels, found)
    pairs = overlaps(record)
    if pairs:
        yield Text("Kept weights in common, of those either keeps", style="bold")
        for one, other, text in pairs:
            yield Text(f"  {one} and {other}: {text}")
        yield Text("")


def verdict(record: Mapping[str, Any]) -> str:
    """Every model against the first: how much room it takes, how well it predicts, how fast."""
    first, *others = record["models"]
    alike = _share_a_tokenizer(record)
    told = [f"{row['label']} {said}" for row in others if (said := _against(first, row, alike))]
    return f"Beside {first['label']}, {'; '.join(told)}." if told else ""


def _against(first: Row, row: Row, alike: bool) -> str:
    """alike: whether their perplexities are of the same tokens."""
    parts = []
    before, after = first.get("weight_bytes"), row.get("weight_bytes")
    if is_number(before) and is_number(after) and before > 0:
        share = f"{100 * after / before:.0f}"
        parts.append("is as large" if share == "100" else f"has {share} % of the size")
    one, other = (_mapping(each.get("perplexity")) for each in (first, row))
    values = one.get("perplexity"), other.get("perplexity")
    same_text = alike and _text_of(one) == _text_of(other)
    if same_text and is_number(values[0]) and is_number(values[1]):
        parts.append(f"{'' if parts else 'has '}perplexity {change(values[0], values[1])}")
    slow, fast = (_mapping(each.get("speed")).get(DECODING) for each in (first, row))
    if is_number(slow) and is_number(fast) and slow > 0:
        times = f"{fast / slow:.2g}"
        parts.append("decodes as fast" if times == "1" else f"decodes {times} times as fast")
    return ", ".join(parts)


def _share_a_tokenizer(record: Mapping[str, Any]) -> bool:
    count = record.get("tokenizers")
    return not (is_number(count) and count > 1)


def next_steps(record: Mapping[str, Any], has_page: bool = False) -> list[tuple[str, str]]:
    """Commands that go on from a comparison, and what each is for."""
    rows: Sequence[Row] = record["models"]
    given = " ".join(shlex.quote(row["given"]) for row in rows)
    models = [row for row in rows if row["what"] in MODELS]
    steps = []
    if not has_page:
        steps.append((f"symprune compare {given} --html compare.html", "all of it as a page"))
    if models and not any(row.get("speed") for row in rows):
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


def _table(heading: str, labels: Sequence[str], found: Mapping[str, list[str]]) -> Iterator[Table]:
    table = Table(title=heading, title_justify="left")
    table.add_column("", style="bold", max_width=NAME)
    for label in labels:
        table.add_column(Text(label), justify="right", overflow="fold")
    for name, texts in found.items():
        table.add_row(Text(name), *map(Text, texts))
    yield table


def _lists(heading: str, labels: Sequence[str], found: Mapping[str, list[str]]) -> Iterator[Text]:
    """A figure on a line, under the model it is of."""
    yield Text(heading, style="bold")
    for place, label in enumerate(labels):
        yield Text(label, style="cyan")
        for name, texts in found.items():
            if texts[place]:
                yield Text(f"  {name}: {texts[place]}")
    yield Text("")


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    return value if isinstance(value, str) else ""


def _number(row: Row, name: str, text: Any) -> str:
    value = row.get(name)
    return str(text(value)) if is_number(value) else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
