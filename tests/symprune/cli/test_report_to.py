"""`--report-to`: figures reach TensorBoard and Weights & Biases, and a logger that fails stops
nothing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import resource
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from symprune.cli import main
from symprune.errors import SympruneError
from symprune.tracking import tracker

STAND_IN = Path(__file__).parents[2] / "support" / "pretend_wandb"
SMALL = (
    "--calibration", "builtin", "--nsamples", "2", "--seqlen", "32", "--eval-windows", "2",
)  # fmt: skip
BLOCKS = 2


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The stand-in, found where wandb would be."""
    monkeypatch.syspath_prepend(STAND_IN)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    found = importlib.import_module("wandb")
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)


def symprune(*arguments: str | Path) -> Any:
    result = CliRunner().invoke(main.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def read_events(folder: Path) -> Any:
    """What TensorBoard reads of the one run in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = folder.iterdir()
    found = EventAccumulator(str(run))
    found.Reload()
    return found


def steps_of(events: Any, tag: str) -> dict[int, float]:
    return {each.step: each.value for each in events.Scalars(tag)}


def test_a_run_reports_every_block_and_what_it_came_to(
    tiny_folder: Path, tmp_path: Path, wandb: ModuleType
) -> None:
    pytest.importorskip("tensorboard")
    both = ("--report-to", "tensorboard", "--report-to", "wandb", "--report-error")
    told = symprune(
        "prune", "--model", tiny_folder, "-o", tmp_path / "half", *SMALL, "--no-samples", *both
    )
    assert "TensorBoard logs to runs/half-" in told.stderr
    record = json.loads((tmp_path / "half" / "symprune.json").read_text())
    events = read_events(tmp_path / "runs")
    assert len(steps_of(events, "progress/tokens_per_second")) == BLOCKS
    error = next(x for x in record["layers"] if x["name"].endswith("1.mlp.down_proj.weight"))
    errors = steps_of(events, f"relative_error/{error['kind']}")
    assert errors[1] == pytest.approx(error["relative_error"], rel=1e-5)
    measured = record["perplexity"][0]
    assert steps_of(events, "perplexity/builtin/pruned")[0] == pytest.approx(
        measured["pruned"], rel=1e-5
    )
    (run,) = wandb.runs
    assert run.exit_code == 0 and run.given["name"] == "half"
    assert run.given["project"] == "symprune" and run.given["config"]["sparsity"] == 0.5
    assert run.axes["progress/minutes"] == "block"
    assert [row["block"] for row in run.rows if "progress/minutes" in row] == [0, 1]
    (last,) = [row for row in run.rows if "run" in row]
    assert last["perplexity/builtin/dense"] == measured["dense"]
    assert last["result/sparsity"] == record["sparsity"]
    assert run.summary["verdict"].startswith("Half the weights gone")


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_logger_that_fails_is_named_once_and_the_run_goes_on(
    broken: str, tiny_folder: Path, tmp_path: Path, wandb: ModuleType
) -> None:
    wandb.fails[broken] = RuntimeError("no API key, log in first.\nMore words")
    told = symprune(
        "prune", "--model", tiny_folder, "-o", tmp_path / "half", *SMALL, "--no-samples",
        "--no-eval", "--method", "magnitude", "--report-to", "wandb",
    )  # fmt: skip
    assert (tmp_path / "half" / "symprune.json").exists()
    said = "no API key, log in first); the run goes on without it."
    assert told.stderr.replace("\n", " ").count(said) == 1 and "More words" not in told.stderr


def test_a_run_that_ends_early_is_marked_as_failed(
    tiny_folder: Path, tmp_path: Path, wandb: ModuleType
) -> None:
    (tmp_path / "half").mkdir()
    with pytest.raises(SympruneError, match="exists"):
        symprune("prune", "--model", tiny_folder, "-o", "half", *SMALL, "--report-to", "wandb")
    assert [run.exit_code for run in wandb.runs] == [1]


def test_a_sweep_reports_every_cell_those_done_before_too(
    tiny_folder: Path, tmp_path: Path, wandb: ModuleType
) -> None:
    grid = {"methods": ["magnitude"], "sparsities": [0.3, 0.5], "calibration": "builtin"}
    grid |= {"eval_data": "builtin", "eval_windows": 2, "seqlen": 32}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    for number in range(2):
        symprune(
            "sweep", "--model", tiny_folder, "--grid", "grid.yaml", "-o", "s.jsonl",
            "--report-to", "wandb",
        )  # fmt: skip
        cells = [json.loads(line) for line in Path("s.jsonl").read_text().splitlines()]
        rows = wandb.runs[number].rows
        assert [row["cell"] for row in rows] == [0, 1]
        assert [row["sweep/perplexity"] for row in rows] == [c["perplexity"] for c in cells]
        assert "30 %" in rows[0]["cell is"]


def test_federated_runs_report_every_round(tmp_path: Path, wandb: ModuleType) -> None:
    run = ("fed", "run", "--algorithm", "fedavg", "--clients", "2", "--rounds")
    symprune(*run, "2", "--checkpoint", "state.safetensors", "--quiet")
    symprune(*run, "3", "--checkpoint", "state.safetensors", "--report-to", "wandb", "--quiet")
    rounds = {row["round"]: row for row in wandb.runs[0].rows}
    assert sorted(rounds) == [0, 1, 2, 3]
    assert rounds[3]["fed/loss"] < rounds[0]["fed/loss"] and rounds[3]["fed/bytes_up"] > 0
    plan = {"problem": {"data": "digits", "clients": 2}, "rounds": 2, "seeds": [0, 1]}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**plan, "algorithms": ["fedavg"]}))
    symprune("fed", "compare", "plan.yaml", "--output", "out", "--report-to", "wandb")
    seen = {name for row in wandb.runs[1].rows for name in row if name.endswith("/accuracy")}
    assert seen == {"fedavg, seed 0/accuracy", "fedavg, seed 1/accuracy"}


def test_what_is_not_installed_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "find_spec", lambda name: None)
    with pytest.raises(SympruneError, match=r"needs a package that is not installed: pip install"):
        symprune("prune", "--model", "no-model-at-all", "--report-to", "wandb")
    with pytest.raises(SympruneError, match="finds nothing to report to"):
        symprune("fed", "run", "--algorithm", "fedavg", "--report-to", "all")
    with pytest.raises(SympruneError, match="not 'mlflow'"):
        symprune("prune", "--model", "no-model-at-all", "--report-to", "mlflow")
    assert tracker.choose(["none"]) == []


def test_all_is_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "find_spec", lambda name: name == "wandb" or None)
    assert tracker.choose(["all"]) == ["wandb"]
    monkeypatch.setattr(tracker, "find_spec", lambda name: True)
    assert tracker.choose(["wandb,tensorboard", "wandb"]) == ["wandb", "tensorboard"]


def test_a_folder_that_cannot_be_made_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "file"))
    said: list[str] = []
    loggers = tracker.Tracker(["tensorboard"], "run", {}, said.append)
    loggers.add("block", 0, {"figure": 1.0})
    loggers.close()
    assert len(said) == 1 and said[0].startswith("TensorBoard is not logged to (")


def test_a_disk_that_is_full_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    said: list[str] = []
    with tracker.tracked(["tensorboard"], "run", {}, lambda _: None, said.append) as loggers:
        (file,) = next(tmp_path.iterdir()).iterdir()
        before, limits = file.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, limits[1]))
        try:
            for step in range(3):
                loggers.add("block", step, {"figure": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(said) == 1 and said[0].startswith("TensorBoard is not logged to (")
