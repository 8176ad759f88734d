"""A comparison as tables, lists and a page, from its record alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from fuzzing import EXAMPLES, changed_json, fuzz
from reports import Page
from rich.console import Console

from symprune.eval import comparison, recommendation, report
from symprune.eval.report import compare as page
from symprune.jobs.choosing.sources import read_source
from symprune.models.hub import Access

LAYERS = [
    {"name": f"model.layers.{b}.mlp.up_proj.weight", "kind": "mlp.up_proj", "relative_error": e}
    for b, e in enumerate((0.125, 0.375))
]
RECORD: dict[str, Any] = {
    "kind": "compare",
    "models": [
        {"given": "dense", "label": "dense", "what": "dense", "sparsity": 0.0},
        {
            "given": "runs/<half>", "label": "<half>", "what": "pruned", "sparsity": 0.5,
            "description": "ria, 50 % per row", "weight_bytes": 1_500_000, "bits_per_weight": 9.0,
            "perplexity": {"data": "builtin", "windows": 8, "seqlen": 512, "perplexity": 37.24},
            "recorded": [{"data": "c4", "windows": 2, "seqlen": 64, "dense": 9, "pruned": 12.5}],
            "tasks": {"piqa": 0.625}, "layers": LAYERS,
            "speed": {"decode_tokens_per_second": 12.5},
        },
    ],
    "overlap": [[None, None], [{"share": 0.5, "by_chance": 0.25}, None]],
    "samples": [
        {
            "prompt": "One",
            "continuations": [{"by": "dense", "text": "two", "tokens": 2, "same": 2}],
        }
    ],
    "versions": {"symprune": "1"},
    "notes": ["mind this"],
}  # fmt: skip
EXPECTED = {
    "kind": ["dense", "pruned"],
    "recipe": ["", "ria, 50 % per row"],
    "sparsity": ["0.00 %", "50.00 %"],
    "weights on disk": ["", "1.5 MB"],
    "bits a weight": ["", "9.00"],
    "perplexity, builtin (8 x 512)": ["", "37.24"],
    "recorded perplexity, c4 (2 x 64)": ["", "12.50"],
    "piqa": ["", "62.50 %"],
    "error of a layer, calibration": ["", "0.25"],
    "decoding, tokens/s": ["", "12.5"],
}


def shown(record: dict[str, Any], width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    for part in comparison.show(record, width):
        console.print(part, highlight=False, markup=False)
    return console.export_text()


def test_every_figure_that_is_known_of_any_has_a_row() -> None:
    assert comparison.figures(RECORD["models"]) == EXPECTED
    assert comparison.errors_by_block(RECORD["models"][1], "relative_error") == {0: 0.125, 1: 0.375}


def row(label: str, perplexity: float, size: int, decode: float = 0, **others: Any) -> Any:
    text = {"data": "builtin", "windows": 8, "seqlen": 512, "perplexity": perplexity}
    speed = {"speed": {"decode_tokens_per_second": decode}} if decode else {}
    known = {"given": f"runs/{label}", "label": label, "what": "pruned", "sparsity": 0.5}
    return {**known, "perplexity": text, "weight_bytes": size, **speed, **others}


DENSE = row("dense", 36.0, 1000, 10, what="dense", sparsity=0.0)


@pytest.mark.parametrize(
    ("rows", "tokenizers", "said"),
    [
        (
            [DENSE, row("half", 58.3, 560, 15)],
            1,
            "Beside dense, half has 56 % of the size, perplexity 36.0 -> 58.3 (+62 %), decodes 1.5 "
            "times as fast.",
        ),
        (
            [DENSE, row("half", 58.3, 1001, 10.1), row("most", 90.0, 280)],
            2,
            "Beside dense, half is as large, decodes as fast; most has 28 % of the size.",
        ),
        ([{"given": "a", "label": "a", "what": "record"}] * 2, 1, ""),
    ],
)
def test_one_sentence_says_what_it_comes_to(rows: list[Any], tokenizers: int, said: str) -> None:
    assert comparison.verdict({"models": rows, "tokenizers": tokenizers}) == said


def test_what_was_measured_on_other_texts_is_not_compared() -> None:
    other = {"data": "builtin", "windows": 8, "seqlen": 64, "perplexity": 20.0}
    rows = [DENSE, row("half", 58.3, 560) | {"perplexity": other}]
    assert "perplexity" not in comparison.verdict({"models": rows})


def test_the_next_steps_are_commands_for_what_is_not_known_yet() -> None:
    dense = row("dense", 36.0, 1000, what="dense")
    half = row("my half", 58.3, 560, name="runs/my half")
    steps = [command for command, _ in comparison.next_steps({"models": [dense, half]})]
    assert steps == [
        "symprune compare runs/dense 'runs/my half' --html compare.html",
        "symprune bench runs/dense 'runs/my half'",
        "symprune eval --model 'runs/my half' --against runs/dense",
    ]
    known = row("half", 58.3, 560, 15, tasks={"piqa": 0.6}, what="record")
    assert comparison.next_steps({"models": [DENSE, known]}, has_page=True) == []


@pytest.mark.parametrize("width", [100, 80, 40])
def test_nothing_is_cut_in_any_width(width: int) -> None:
    text = shown(RECORD, width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert ("┏" in text) == (width >= 60)
    flat = " ".join(text.split())
    for wanted in ("37.24", "62.50 %", "50.00 % (by chance 25.00 %)", "mlp.up_proj"):
        assert wanted in flat


def test_the_page_has_figures_samples_and_a_picture_and_takes_names_as_text() -> None:
    found = Page(page.build(RECORD))
    assert "<half>" in found.text and "mind this" in found.text
    assert found.tables[0][1:] == [
        [name, *(text or "–" for text in texts)] for name, texts in EXPECTED.items()
    ]
    for wanted in ("The same prompts, continued", "Do they keep the same weights?"):
        assert wanted in found.text
    assert "Error of a layer, calibration" in found.text


def test_a_saved_comparison_is_drawn_by_report(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(RECORD))
    report.write(tmp_path / "c.json", tmp_path / "c.html")
    assert "Do they keep the same weights?" in (tmp_path / "c.html").read_text()


@EXAMPLES
def test_a_damaged_comparison_is_drawn_or_refused(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "c.json"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        Page(report.build(file))
        shown(json.loads(data), 80)

    read(json.dumps(RECORD).encode())
    fuzz(read, changed_json(RECORD), examples)


@EXAMPLES
def test_a_damaged_result_is_compared_or_refused(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "tasks.json"
    scores = {"tasks": {"piqa": {"value": 0.5}, "boolq": {"value": 0.75}}, "mean": 0.625}

    def read(data: bytes) -> None:
        file.write_bytes(data)
        read_source(str(file), "auto", Access())

    for good in ({"model": "m", "zeroshot": scores}, {"model": "m", "recipe": {}, "layers": []}):
        read(json.dumps(good).encode())
        fuzz(read, changed_json(good), examples)


RESULT = {
    "model": "m", "size": 0.6, "loss": None, "data": "builtin", "windows": 8, "seqlen": 512,
    "dense": 20.0, "dense_bytes": 1000.0, "recommended": None,
    "tried": [
        {"choice": "fast, 50 %", "bytes": 560.0, "perplexity": 40.0, "seconds": 1.0,
         "values": None, "command": "symprune prune --model m"},
        {"choice": "all weights, int8", "bytes": 520.0, "perplexity": 21.0, "seconds": 2.0,
         "values": "int8", "command": "symprune prune --model m --values int8"},
    ],
}  # fmt: skip


def test_a_recommendation_is_one_sentence_and_commands() -> None:
    found = {**RESULT, "recommended": RESULT["tried"][1]}
    assert recommendation.verdict(found) == (
        "For 60 % of the size: all weights, int8, perplexity 20.0 -> 21.0 (+5.0 %), 52 % of the "
        "size when packed."
    )
    assert recommendation.steps(found) == ["symprune prune --model m --values int8"]
    plain = {**RESULT, "recommended": RESULT["tried"][0]}
    assert recommendation.steps(plain)[1] == "symprune pack DIR PACKED"
    assert "all weights, int8 comes nearest" in recommendation.verdict(RESULT)


@pytest.mark.parametrize("width", [80, 40])
def test_tries_are_shown_smallest_first_in_any_width(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    for part in recommendation.show(RESULT, width):
        console.print(part, highlight=False)
    text = console.export_text()
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert text.index("int8") < text.index("fast")


def test_every_model_is_held_against_the_first_in_a_sentence() -> None:
    text = {"data": "builtin", "windows": 8, "seqlen": 512}
    rows = [
        {"label": name, "weight_bytes": size, "perplexity": {**text, "perplexity": figure}}
        for name, size, figure in (("dense", 200, 20.0), ("half", 112, 25.0), ("same", 200, 20.0))
    ]
    assert comparison.verdict({"models": rows}) == (
        "Beside dense, half has 56 % of the size, perplexity 20.0 -> 25.0 (+25 %); same is as "
        "large, perplexity unchanged at 20.0."
    )
    rows[1]["perplexity"] = {**text, "data": "c4", "perplexity": 25.0}
    assert comparison.verdict({"models": rows[:2]}) == "Beside dense, half has 56 % of the size."
    assert comparison.verdict(RECORD) == ""
