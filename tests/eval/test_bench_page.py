"""A bench as a table and as a page of bars."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from reports import Page
from rich.console import Console

from symprune.errors import SympruneError
from symprune.eval import report, tables


def row(label: str, decode: float, **changes: Any) -> dict[str, Any]:
    known: dict[str, Any] = {
        "given": label,
        "label": label,
        "engine": "PyTorch",
        "dtype": "bfloat16",
        "packed": [],
        "decode_tokens_per_second": decode,
        "decode_times_first": decode / 20,
        "prefill_tokens_per_second": 800.0,
        "prefill_times_first": 1.0,
        "first_token_seconds": 0.16,
        "memory_bytes": 300_000_000,
        "process_bytes": 700_000_000,
        "file_bytes": 270_000_000,
        "bits_per_weight": 16.0,
        "perplexity": {"data": "builtin", "windows": 24, "seqlen": 512, "perplexity": 12.5},
    }
    return known | changes


@pytest.fixture
def record() -> dict[str, Any]:
    packed = {"packed": ["int4"], "bits_per_weight": 3.27, "file_bytes": 71_000_000}
    return {
        "kind": "bench",
        "plan": {"prompt_tokens": 128, "new_tokens": 32, "rounds": 5, "threads": 2},
        "models": [row("<dense>", 20.0), row("[packed]", 50.0, **packed)],
        "machine": {"processor": "A & B", "cores": 2, "other_work": 0.0},
        "versions": {"torch": "2"},
        "notes": ["Something <b>to know</b>."],
    }


def shown(record: dict[str, Any], width: int = 80) -> str:
    console = Console(width=width, file=StringIO())
    with console.capture() as captured:
        console.print(tables.bench(record))
    return captured.get()


def test_the_table_has_a_column_a_model_and_fits_a_terminal(record: dict[str, Any]) -> None:
    text = shown(record)
    assert "[packed]" in text and "packed int4" in text and "PyTorch" in text and "<dense>" in text
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    assert "20.0" in lines["decoding, tokens/s"] and "50.0" in lines["decoding, tokens/s"]
    assert "71.0 MB" in lines["size on disk"] and "3.27" in lines["bits a weight"]
    assert "12.50" in lines["perplexity, builtin (24 x 512)"]
    assert "medians of 5 rounds in turns" in text and "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_one_model_has_nothing_to_be_compared_with(record: dict[str, Any]) -> None:
    record["models"] = record["models"][:1]
    del record["models"][0]["perplexity"]
    text = shown(record)
    assert "times the first" not in text and "perplexity" not in text


def test_the_page_draws_a_bar_a_model_for_every_figure(record: dict[str, Any]) -> None:
    page = Page(report.bench.build(record))
    bars = page.having("rect", "class", "bar")
    assert len(bars) == 7 * 2 * 2  # figures x models x (wide, narrow)
    first, second = (float(bar["width"] or 0) for bar in bars[:2])
    assert second / first == pytest.approx(2.5, rel=0.01)  # from zero: lengths are the figures
    assert "50.0 tokens/s" in page.text and "2.50 ×" in page.text and "71.0 MB" in page.text
    (table,) = page.tables
    assert len(table) == 3 and table[2][0] == "[packed] (packed int4, PyTorch)"
    assert "Something <b>to know</b>." in page.text and "A & B" in page.text


def test_what_was_not_measured_is_not_drawn(record: dict[str, Any]) -> None:
    del record["models"][0]["perplexity"]
    record["models"][1]["perplexity"]["perplexity"] = float("inf")
    page = Page(report.bench.build(record))
    assert len(page.having("rect", "class", "bar")) == 6 * 2 * 2
    assert "Perplexity" not in page.tables[0][0] and "–" not in page.tables[0][1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not the JSON file of a bench"),
        ("[]", "is not the JSON file of a bench"),
        ('{"kind": "bench", "models": []}', "is not the JSON file of a bench"),
        ('{"kind": "bench", "models": [{"label": "x"}]}', "not fully described"),
    ],
)
def test_what_is_no_bench_is_said_in_one_sentence(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "bench.json").write_text(content)
    with pytest.raises(SympruneError, match=said):
        report.build(tmp_path / "bench.json")


def test_the_page_of_a_file_is_that_of_its_record(record: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps(record))
    assert report.build(tmp_path / "bench.json") == report.bench.build(record)
    with pytest.raises(SympruneError, match="holds no matrix"):
        report.build(tmp_path / "bench.json", matrix="x")
    out = report.write_bench(record, tmp_path / "page.html")
    assert report.write_bench(record, out).read_text() == report.bench.build(record)
