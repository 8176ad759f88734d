"""Runs, sweeps and later evaluations warn of text that was calibrated on."""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest

from symprune import Recipe
from symprune.jobs import pruning
from symprune.jobs.evaluate import evaluate
from symprune.jobs.sweep import Grid, Sweep
from symprune.models import hub

LONG = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    families.model().save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def text() -> str:
    return str(hub.__file__)


def warnings(record: dict[str, object]) -> list[str]:
    notes = record["notes"]
    assert isinstance(notes, list)
    return [note for note in notes if "that were calibrated on" in note]


def test_a_run_and_a_later_eval_warn(folder: Path, tmp_path: Path, text: str) -> None:
    recipe = Recipe(method="wanda", calibration=text, nsamples=8, seqlen=LONG)
    said: list[str] = []
    job = pruning.Job(str(folder), recipe, tmp_path / "out", eval_data=text, eval_windows=60)
    record = pruning.prune(job, said.append)
    (note,) = warnings(record)
    assert note in said and "the perplexity after pruning is too good" in note
    later = evaluate(str(tmp_path / "out"), text, LONG, 60)
    assert len(warnings(later)) == 1
    assert warnings(evaluate(str(tmp_path / "out"), "builtin", LONG, 5)) == []
    assert warnings(evaluate(str(folder), text, LONG, 5)) == []


def test_no_hashes_are_kept_if_that_is_not_wanted(folder: Path, tmp_path: Path, text: str) -> None:
    recipe = Recipe(method="wanda", calibration=text, nsamples=2, seqlen=LONG)
    job = pruning.Job(str(folder), recipe, tmp_path / "out", evaluate=False, keep_hashes=False)
    pruning.prune(job)
    kept = json.loads((tmp_path / "out" / "symprune.json").read_text())
    assert "calibration_passages" not in kept
    assert warnings(evaluate(str(tmp_path / "out"), text, LONG, 60)) == []


def test_a_sweep_warns(tmp_path: Path, text: str) -> None:
    grid = Grid(
        methods=["wanda", "ria"], calibration=text, nsamples=8, seqlen=LONG, eval_data=text,
        eval_windows=30,
    )  # fmt: skip
    job = Sweep(families.model(), families.tokenizer(), "m", grid, tmp_path / "results")
    assert [len(warnings(cell)) for cell in job.run()] == [1, 1]
    clean = Grid(
        methods=["wanda"], calibration="builtin", nsamples=8, seqlen=LONG, eval_data=text,
        eval_windows=30,
    )  # fmt: skip
    job = Sweep(families.model(), families.tokenizer(), "m", clean, tmp_path / "others")
    assert [warnings(cell) for cell in job.run()] == [[]]
