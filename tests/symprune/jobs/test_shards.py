"""Parts of a sweep: together they are the whole, and what does not fit together is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzzing import EXAMPLES, changed_json, fuzz
from typer.testing import CliRunner

from symprune.cli import main
from symprune.errors import SympruneError
from symprune.jobs.sharing.shards import Shard, merge, write
from symprune.jobs.sweep import read_results


def cell(key: str, perplexity: float = 20.0, **others: Any) -> dict[str, Any]:
    about = {"model": "tiny", "description": f"cell {key}", "data": "builtin", "recipe": {}}
    figures = {"dense": 10.0, "perplexity": perplexity, "sparsity": 0.5, "seconds": 1.0}
    return {"key": key, **about, **figures, **others}


def results(path: Path, *cells: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in cells))
    return path


def test_every_cell_is_in_exactly_one_shard() -> None:
    cells = list(range(29))
    parts = [Shard(number, 8).pick(cells) for number in range(1, 9)]
    assert sorted(each for part in parts for each in part) == cells
    assert max(map(len, parts)) - min(map(len, parts)) == 1
    assert Shard.parse("3/8").name(Path("a/sweep.jsonl")) == Path("a/sweep.3of8.jsonl")


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "3/", "a/b", "-1/2", "3/8/9", "1/999999"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(SympruneError, match="A shard is K/N"):
        Shard.parse(text)


def test_a_shard_without_cells_is_refused() -> None:
    with pytest.raises(SympruneError, match="The grid has 2 cells, so shard 3/3 has none"):
        Shard(3, 3).pick([1, 2])


def test_merged_shards_are_the_whole_and_missing_ones_are_named(tmp_path: Path) -> None:
    one = results(tmp_path / "s.1of3.jsonl", cell("a"), cell("c"))
    three = results(tmp_path / "s.3of3.jsonl", cell("b"))
    merged = merge([one, three])
    assert list(merged.cells) == ["a", "c", "b"]
    assert merged.notes == ["Of the 3 shards of s, 2 is not among the files."]
    write(merged, tmp_path / "whole.jsonl", force=False)
    assert read_results(tmp_path / "whole.jsonl") == merged.cells
    with pytest.raises(SympruneError, match="exists"):
        write(merged, tmp_path / "whole.jsonl", force=False)


def test_duplicates_and_contradictions_are_said(tmp_path: Path) -> None:
    first = results(tmp_path / "a.jsonl", cell("a"), cell("b", 20.0))
    second = results(tmp_path / "b.jsonl", cell("a", seconds=9.0), cell("b", 21.0))
    merged = merge([first, second])
    assert merged.cells["b"]["perplexity"] == 20.0
    told, counted = merged.notes
    assert "cell b: perplexity is 20.0 in" in told and "and 21.0 in" in told
    assert counted == "1 cell is in several files, with the same results."


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine\n")
    with pytest.raises(SympruneError, match="was not written by a sweep"):
        merge([tmp_path / "notes.txt"])
    with pytest.raises(SympruneError, match="no file of results"):
        merge([tmp_path / "none.jsonl"])
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(SympruneError, match="no finished cells"):
        merge([tmp_path / "empty.jsonl"])


@EXAMPLES
def test_any_results_are_merged_or_refused(examples: int, tmp_path: Path) -> None:
    one, other = results(tmp_path / "a.jsonl", cell("a")), tmp_path / "b.jsonl"

    def read(data: bytes) -> None:
        other.write_bytes(data)
        merge([one, other])

    fuzz(read, changed_json(cell("a", 21.0)), examples)


def test_shards_of_a_sweep_make_the_sweep(tiny_folder: Path, tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        "methods: [magnitude, wanda]\nsparsities: [0.3, 0.5]\ncalibration: builtin\nnsamples: 2\n"
        "seqlen: 16\neval_data: builtin\neval_windows: 2\n"
    )

    def run(*arguments: object) -> str:
        return (
            CliRunner().invoke(main.app, list(map(str, arguments)), catch_exceptions=False).output
        )

    asked = ("sweep", "-m", tiny_folder, "--grid", grid, "--device", "cpu", "-o")
    run(*asked, tmp_path / "whole.jsonl")
    for shard in ("1/2", "2/2"):
        run(*asked, tmp_path / "part.jsonl", "--shard", shard)
    parts = sorted(tmp_path.glob("part.*of2.jsonl"))
    assert "4 cells in" in run("merge", *parts, "-o", tmp_path / "merged.jsonl")
    whole, merged = (read_results(tmp_path / f"{n}.jsonl") for n in ("whole", "merged"))
    for each in (*whole.values(), *merged.values()):
        del each["seconds"]
    assert whole == merged and len(whole) == 4
