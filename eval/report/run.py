"""The page of one pruned model: the verdict, the recipe, its words, its layers, one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from symprune.checkpoint.record import RECORD, read_record
from symprune.errors import SympruneError
from symprune.eval.report import heatmap, layers, opening, page, samples
from symprune.eval.report.layers import Layer, mean, number_in
from symprune.eval.report.page import figure_text
from symprune.eval.tables import percent, size
from symprune.eval.verdict import verdict
from symprune.validation import is_number

MOST_ROWS = 2000


def build(folder: Path, matrix: str | None = None) -> str:
    """The page of the folder `symprune prune` wrote."""
    record = _record(folder)
    every: list[Layer] = record["layers"]
    merged = layers.merge(every)
    pair = heatmap.read(folder, every, matrix)
    told = str(record.get("description") or "")
    sections = [
        page.section("Figures", page.cards(_cards(record)), *_notes(record)),
        *samples.sections(record),
        layers.section(merged),
    ]
    recipe = record.get("recipe")
    if isinstance(recipe, dict) and recipe:
        sections.insert(0, _recipe(record, recipe))
    if pair is not None:
        sections.append(page.section("A matrix and its mask", heatmap.figure(pair)))
    shown = every if len(every) <= MOST_ROWS else merged
    sections.append(page.section("All matrices", page.filtered("Filter", layers.table(shown))))
    versions = record.get("versions")
    made = versions if isinstance(versions, dict) else {}
    facts = ", ".join(f"{name} {version}" for name, version in made.items())
    return page.document(
        str(record.get("origin") or record.get("model", folder.name)),
        told,
        [part for part in sections if part],
        f"The run: {facts}." if facts else "",
        page.verdict(verdict(record).replace(" -> ", " → ")),
    )


def _recipe(record: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    model = str(record.get("model") or record.get("origin") or "MODEL")
    measured = record.get("perplexity")
    entry = measured[0] if isinstance(measured, list) and measured else {}
    entry = entry if isinstance(entry, dict) else {}
    command = opening.recipe_text(
        model,
        recipe,
        revision=record.get("revision"),
        dtype=record.get("dtype"),
        compute_dtype=record.get("compute_dtype"),
        eval_data=entry.get("data"),
        eval_windows=entry.get("windows"),
    )
    return page.section("The command to repeat it", command)


def _record(folder: Path) -> dict[str, Any]:
    """The folder's record, checked for what the page is made of."""
    record = read_record(folder)
    if record is None:
        raise SympruneError(f"{folder} is neither a run nor a sweep: it has no {RECORD}.")
    found = record.get("layers")
    if not isinstance(found, list) or not found:
        raise SympruneError(f"{folder / RECORD} names no pruned layers.")
    if not all(_is_described(layer) for layer in found):
        raise SympruneError(f"{folder / RECORD} has a layer that is not fully described.")
    return record


def _is_described(layer: Any) -> bool:
    return (
        isinstance(layer, dict)
        and all(isinstance(layer.get(name), str) for name in ("name", "kind"))
        and all(isinstance(layer.get(name), int) for name in ("rows", "columns", "removed"))
        and layer["rows"] * layer["columns"] > 0
        and is_number(layer.get("sparsity"))
    )


def _cards(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    items = []
    for entry in record.get("perplexity") or []:
        if not (is_number(entry.get("dense")) and is_number(entry.get("pruned"))):
            continue
        remark = f"dense {figure_text(entry['dense'])}"
        if entry.get("windows") and entry.get("seqlen"):
            remark += f", {entry['windows']} × {entry['seqlen']} tokens"
        items.append(
            (
                f"perplexity, {entry.get('data', 'held-out text')}",
                figure_text(entry["pruned"]),
                remark,
            )
        )
        items += _divergence(entry.get("divergence"))
    items += _error_card(record["layers"])
    removed = sum(layer["removed"] for layer in record["layers"])
    weights = sum(layer["rows"] * layer["columns"] for layer in record["layers"])
    remark = f"{removed:,} of {weights:,} weights"
    items.append(("sparsity of the pruned matrices", percent(removed / weights), remark))
    total = number_in(record, "parameters")
    if total:
        items.append(
            ("sparsity of the whole model", percent(removed / total), f"{total:,} parameters")
        )
    after, before = number_in(record, "pruned_bytes"), number_in(record, "dense_bytes")
    if after:
        remark = f"dense {size(before)}" if before else ""
        items.append(("size of the weights on disk", size(after), remark))
    bits, was = (number_in(record, f"{name}bits_per_weight") for name in ("", "dense_"))
    if bits:
        remark = f"dense {was:.2f}" if was else ""
        items.append(("bits a weight of these matrices", f"{bits:.2f}", remark))
    seconds = record.get("seconds")
    if isinstance(seconds, dict):
        items.append(("time to prune", f"{sum(seconds.values()):.1f} s", ""))
    peak = number_in(record, "peak_memory_bytes")
    if peak:
        items.append(("peak memory", size(peak), ""))
    return items


def _error_card(every: list[Layer]) -> list[tuple[str, str, str]]:
    """On held-out tokens, as the terminal has it, where they were measured."""
    held_out, fitted = (mean(every, name) for name in (layers.HELD_OUT, layers.CALIBRATION))
    if held_out is not None:
        beside = "" if fitted is None else f"{figure_text(fitted)} on calibration tokens"
        return [("relative error of a layer, held-out tokens", figure_text(held_out), beside)]
    if fitted is not None:
        name = "relative error of a layer, calibration tokens"
        return [(name, figure_text(fitted), "mean over the matrices")]
    return []


def _divergence(apart: Any) -> list[tuple[str, str, str]]:
    """How far the pruned model's predictions are from the dense one's, where that was measured."""
    if not isinstance(apart, dict):
        return []
    kl, same = number_in(apart, "kl"), number_in(apart, "agreement")
    if kl is None or same is None:
        return []
    return [
        ("KL divergence to the dense model", figure_text(kl), "nats a token; 0 is the same"),
        ("same likeliest token", percent(same), "as the dense model"),
    ]


def _notes(record: Mapping[str, Any]) -> list[str]:
    return [page.paragraph(f"Note: {note}") for note in record.get("notes") or []]
