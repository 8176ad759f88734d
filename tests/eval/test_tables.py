"""The tables a person reads say what the record says."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from symprune.eval import tables


def cells(table: Table) -> list[list[str]]:
    """Row by row."""
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


def layer(kind: str, rows: int, columns: int, removed: int, **figures: float) -> dict[str, Any]:
    size = rows * columns
    plain = {"name": kind, "kind": kind, "rows": rows, "columns": columns, "removed": removed}
    return {**plain, "sparsity": removed / size, **figures}


LAYERS = [layer("q", 10, 10, 50), layer("q", 10, 30, 60), layer("up", 5, 20, 100)]


def test_the_sparsity_of_a_kind_counts_every_weight_once() -> None:
    assert cells(tables.by_kind(LAYERS)) == [
        ["q", "2", "400", "110", "27.50 %"],
        ["up", "1", "100", "100", "100.00 %"],
    ]


def test_errors_are_means_over_the_matrices_that_have_them() -> None:
    known = [
        layer("q", 2, 2, 1, relative_error_base=0.4, relative_error=0.2, exchanged=3),
        layer("q", 2, 2, 1, relative_error_base=0.2, relative_error=0.1, exchanged=1),
        layer("q", 2, 2, 1),
    ]
    assert cells(tables.errors_by_kind(known)) == [["q", "0.3 -> 0.15", "", "", "4"]]


def test_the_summary_tells_the_blocks_from_the_whole_model() -> None:
    record = {
        "model": "tiny",
        "description": "wanda",
        "layers": LAYERS,
        "parameters": 1000,
        "removed": 210,
        "sparsity": 0.42,
        "seconds": {"collect": 1.5, "mask": 2.0},
        "peak_memory_bytes": 1_500_000,
        "input_bytes": 4000,
        "output_bytes": 2500,
        "perplexity": [{"data": "a", "windows": 2, "seqlen": 8, "dense": 10.0, "pruned": 12.5}],
    }
    rows = {row[0]: row[1:] for row in cells(tables.summary(record))}
    assert rows["perplexity, a (2 x 8 tokens)"] == ["10.00", "12.50"]
    assert rows["non-zero weights"] == ["1,000", "790"]
    assert rows["sparsity of the decoder blocks' matrices"] == ["", "42.00 %"]
    assert rows["sparsity of the whole model"] == ["", "21.00 %"]
    assert rows["time to prune"] == ["", "3.5 s"] and rows["peak memory"] == ["", "1.5 MB"]
    assert rows["size on disk"] == ["4.0 kB", "2.5 kB"]


def test_sizes_are_in_the_unit_a_person_would_pick() -> None:
    counts = (0, 999, 1000, 1_234_567, 5_000_000_000)
    assert [tables.size(count) for count in counts] == [
        "0 B", "999 B", "1.0 kB", "1.2 MB", "5.00 GB",
    ]  # fmt: skip
