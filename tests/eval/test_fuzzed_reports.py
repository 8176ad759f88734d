"""Records, sweeps and benches that are nearly right: a page, or one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import reports
from fuzzing import EXAMPLES, changed, changed_json, fuzz

from symprune.checkpoint.record import RECORD
from symprune.eval.report import build

BENCH = {
    "kind": "bench",
    "plan": {"prompt_tokens": 8, "new_tokens": 4, "threads": 1, "rounds": 2},
    "machine": {"processor": "a processor", "cores": 2},
    "versions": {"symprune": "0.1.0"},
    "notes": ["A note."],
    "models": [
        {
            "label": name,
            "engine": "PyTorch",
            "dtype": "float32",
            "packed": [],
            "decode_tokens_per_second": 10.0,
            "prefill_tokens_per_second": 20.0,
            "first_token_seconds": 0.5,
            "memory_bytes": 10**6,
            "file_bytes": 10**6,
            "process_bytes": 10**7,
            "bits_per_weight": 16.0,
            "perplexity": {"perplexity": 9.5, "data": "builtin", "windows": 2, "seqlen": 32},
        }
        for name in ("one", "two")
    ],
}


@EXAMPLES
def test_the_page_of_a_bench_is_made_or_refused(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"

    def read(data: bytes) -> None:
        file.write_bytes(data)
        build(file)

    read(json.dumps(BENCH).encode())
    fuzz(read, changed_json(BENCH), examples)


@EXAMPLES
def test_the_page_of_a_sweep_is_made_or_refused(examples: int, tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    first, second = reports.cell("a"), reports.cell("b", 50.0, relative_error=0.2)

    def read(value: Any) -> None:
        file.write_text(f"{json.dumps(first)}\n{json.dumps(value)}\n")
        build(file)

    read(second)
    fuzz(read, changed(second), examples)


@EXAMPLES
def test_the_page_of_a_run_is_made_or_refused(examples: int, tmp_path: Path) -> None:
    folder = reports.make_run(tmp_path / "run")
    record = json.loads((folder / RECORD).read_text())
    record["layers"] = record["layers"][:2]

    def read(data: bytes) -> None:
        (folder / RECORD).write_bytes(data)
        build(folder)

    read(json.dumps(record).encode())
    fuzz(read, changed_json(record), examples // 4)  # every page has a picture of a matrix
