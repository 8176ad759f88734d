"""What a run is said to take before it begins, and that it is refused where it cannot fit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from symprune import Recipe
from symprune.cli import main
from symprune.engine.predictions import COPIES
from symprune.errors import SympruneError
from symprune.jobs import pruning
from symprune.jobs.estimate.forecast import SLACK, Forecast
from symprune.jobs.estimate.pruning import forecast
from symprune.jobs.estimate.room import Sizes, count_memory
from symprune.jobs.estimate.timed import why
from symprune.jobs.estimate.work import Pace, Work, count_seconds
from symprune.machine import capacity
from symprune.machine.capacity import Capacity, free_disk, room_in_group

PACE = Pace(
    embed=0.01, forward=1.0, collect=2.0, train=5.0, head=0.5, decide=10.0, mask=1.0, load=0.1,
    write=0.2, token=0.02, tokens=0.03, around=0.3,
)  # fmt: skip
WORK = Work(blocks=10, of_blocks=10, samples=4, held_out=1, windows=2, seqlen=32)
SIZES = Sizes(
    block=10**6, blocks=10**7, around=3 * 10**6, window=10**5, largest=10**5, weights=10**6,
    widths=(100, 200), way_back=10**5, vocabulary=1000, seqlen=32, held=10**8, most=10**8,
)  # fmt: skip
SMALL = ["--calibration", "builtin", "--nsamples", "4", "--seqlen", "32", "--eval-windows", "2"]


def steps(recipe: Recipe, work: Work = WORK) -> dict[str, float]:
    return dict(count_seconds(recipe, work, PACE).steps)


def test_each_step_of_a_plain_recipe_is_windows_times_blocks() -> None:
    found = steps(Recipe("wanda"))
    assert found["measuring"] == 10 * 4 * 2.0 and found["passing on"] == 10 * 4 * 1.0
    assert found["masking"] == 10 * 10.0 and found["embedding"] == pytest.approx(4 * 0.01 + 0.3)
    once = 2 * (0.01 + 10 * 1.0 + 0.5) + 2 * (10 * 0.1 + 2 * 0.3)
    assert found["perplexity"] == pytest.approx(2 * once)
    assert found["reading and writing"] == pytest.approx(10 * 0.3)


def test_turns_prompts_and_looks_cost_what_their_parts_do() -> None:
    once = 10 * 0.1 + 0.3  # reading the model
    token = 10 * 0.02 + 0.5 / 32
    work = replace(WORK, blocks=0, turns=4, turn_tokens=(64, 8), looked=1, shown=3, new_tokens=5)
    found = steps(Recipe("magnitude"), replace(work, writers=1))
    assert found["speed"] == pytest.approx(once + 4 * (2 * (0.01 + 10 * 1.0) + 8 * token))
    assert found["continuing prompts"] == pytest.approx(once + 15 * token)
    assert found["looking for zeros"] == pytest.approx(10 * 0.1)
    both = steps(Recipe("magnitude"), work)["continuing prompts"]
    assert both == pytest.approx(2 * found["continuing prompts"])


def test_magnitudes_read_no_text() -> None:
    assert not {"measuring", "passing on", "embedding"} & set(steps(Recipe("magnitude")))


def test_what_a_recipe_adds_takes_longer() -> None:
    plain = Recipe("wanda")
    whole = sum(steps(plain).values())
    for change in (
        {"update": "lsq"}, {"reconstruct": "block"}, {"allocate": "search"}, {"allocate": "owl"},
        {"self_samples": 4}, {"update": "lsq", "targets": "mixed"},
    ):  # fmt: skip
        recipe = plain.with_changes(**change)
        work = replace(WORK, written=recipe.self_samples or 0)
        assert sum(steps(recipe, work).values()) > whole, change


def test_blocks_that_are_done_and_processes_that_help_take_their_share_away() -> None:
    recipe = Recipe("wanda")
    half = steps(recipe, replace(WORK, blocks=5))
    assert half["masking"] == steps(recipe)["masking"] / 2
    shared = steps(recipe, replace(WORK, processes=2))
    assert shared["measuring"] == steps(recipe)["measuring"] / 2


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.integers(1, 64), st.integers(0, 8), st.integers(0, 50))
def test_no_step_takes_less_than_no_time(
    blocks: int, samples: int, held_out: int, windows: int
) -> None:
    work = Work(blocks=blocks, of_blocks=9, samples=samples, held_out=held_out, windows=windows)
    for name in ("fast", "balanced", "best", "mask-only"):
        assert all(value >= 0 for value in steps(Recipe.named(name), work).values())


def test_predictions_of_the_last_block_take_time_and_memory() -> None:
    trained = Recipe("wanda", reconstruct="block")
    outputs = trained.with_changes(reconstruct={"name": "block", "last": "outputs"})
    assert steps(trained)["training"] > steps(outputs)["training"]
    few = replace(WORK, predicted=0.1)
    assert steps(trained)["training"] > steps(trained, few)["training"]
    assert steps(trained, replace(WORK, blocks=0)).get("training", 0) == 0
    dense = trained.with_changes(inputs="dense", reconstruct={"name": "block", "inputs": "dense"})
    assert not dense.trains_predictions
    wide = replace(SIZES, vocabulary=10**6)
    room = [
        count_memory(recipe, wide, samples=4, held_out=1, at_once=0)
        for recipe in (trained, outputs)
    ]
    assert room[0] - room[1] == SIZES.around + COPIES * 4 * 8 * 10**6


def memory(recipe: Recipe, **changes: Any) -> int:
    asked: dict[str, Any] = {"samples": 4, "held_out": 1, "at_once": 2, **changes}
    return count_memory(recipe, SIZES, **asked)


def test_memory_grows_with_what_is_kept() -> None:
    recipe, fitted = Recipe("wanda"), Recipe("wanda", update="lsq")
    assert memory(recipe, samples=400) > memory(recipe)
    assert memory(recipe, samples=400, states_in_memory=False) < memory(recipe, samples=400)
    assert memory(fitted) > memory(recipe) >= SIZES.held
    assert memory(fitted, grams_in_memory=False) < memory(fitted)
    assert memory(Recipe.named("best")) > memory(Recipe.named("balanced"))
    assert memory(recipe, writes=True) >= SIZES.held + SIZES.blocks + SIZES.around
    writing = replace(recipe, self_samples=4)
    assert memory(writing, cache=10**12) - 10**12 >= SIZES.held + SIZES.blocks + SIZES.around


def test_what_was_held_before_is_never_forgotten() -> None:
    sizes = replace(SIZES, most=10**12)
    assert count_memory(Recipe("wanda"), sizes, samples=1, held_out=0, at_once=1) == 10**12


def foreseen(**changes: Any) -> Forecast:
    there = Capacity(memory=10**9, disk=10**9)
    made = Forecast("wanda", "on cpu", there, {"masking": 90.0}, 10.0, 5 * 10**8, 10**8, 10**6)
    return replace(made, **changes)


def test_the_first_lines_say_what_is_done_and_what_it_takes() -> None:
    what, takes = foreseen().sentences()
    assert what == "wanda, on cpu"
    assert takes == (
        "Takes about 100 s, 500.0 MB of memory (of 1.10 GB), 1.0 MB of disk (of 1.00 GB)"
    )


def test_a_run_that_cannot_fit_is_refused() -> None:
    foreseen(memory=int(SLACK * 1.1e9)).check()
    with pytest.raises(SympruneError, match=r"needs about 1\.33 GB of memory, 1\.10 GB can be had"):
        foreseen(memory=int(SLACK * 1.1e9) + 10**7).check()
    with pytest.raises(SympruneError, match=r"writes 2\.00 GB, 1\.00 GB are free"):
        foreseen(disk=2 * 10**9).check()
    small = Capacity(memory=10**12, disk=10**9, accelerator=10**8)
    with pytest.raises(SympruneError, match="of the accelerator's memory"):
        foreseen(capacity=small).check()


def test_the_device_is_said_and_why() -> None:
    cpu, half = torch.device("cpu"), torch.float32
    assert why(cpu, "auto", half, half) == "on cpu (no accelerator was found), in float32"
    assert "as asked for" in why(cpu, "cpu", half, half)


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    told, groups = tmp_path / "cgroup", tmp_path / "groups"
    told.write_text("0::/a/b\n")
    write_group(groups / "a/b", memory__max="max\n", memory__current="10", memory__stat="x 1")
    write_group(groups / "a", memory__max="1000", memory__current="700",
                memory__stat="anon 5\ninactive_file 100\n")  # fmt: skip
    assert room_in_group(groups, told) == 400
    told.write_text("0::/elsewhere\n")
    assert room_in_group(groups, told) is None
    assert room_in_group(groups, tmp_path / "nowhere") is None


def test_version_1_of_control_groups_is_read_as_well(tmp_path: Path) -> None:
    told, groups = tmp_path / "cgroup", tmp_path / "groups"
    told.write_text("4:cpu:/x\n5:memory:/job\n")
    write_group(groups / "memory/job", memory__limit_in_bytes="1000",
                memory__usage_in_bytes="700", memory__stat="total_inactive_file 50\n")  # fmt: skip
    write_group(groups / "memory", memory__limit_in_bytes=str(2**63 - 4096),
                memory__usage_in_bytes="700", memory__stat="")  # fmt: skip
    assert room_in_group(groups, told) == 350


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=40), st.text(max_size=20))
def test_whatever_a_control_group_says_no_command_ends(told: str, limit: str) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as place:
        of_process, groups = Path(place, "cgroup"), Path(place, "groups")
        of_process.write_text(f"0::/a\n{told}", errors="ignore")
        write_group(groups / "a", memory__max=limit, memory__current="1", memory__stat="a b\n")
        found = room_in_group(groups, of_process)
        assert found is None or found >= 0


def test_the_disk_of_a_folder_that_is_not_there_yet_is_its_parents(tmp_path: Path) -> None:
    assert free_disk(tmp_path / "a" / "b") > 0


def test_free_memory_minds_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "room_in_group", lambda: 12345)
    assert capacity.free_memory() == 12345


def dry_run(*arguments: str | Path) -> dict[str, Any]:
    """What a dry run foresees, read from the file it writes."""
    said = CliRunner().invoke(main.app, [str(a) for a in arguments], catch_exceptions=False)
    assert said.exit_code == 0 and "memory at most" in said.output and "time" in said.output
    return json.loads(Path(arguments[-1]).read_text()) if "--json" in arguments else {}


@pytest.mark.parametrize("recipe", ["fast", "balanced", "best"])
def test_a_dry_run_of_prune_says_all_and_writes_nothing(
    recipe: str, tiny_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "there" / "out"
    found = dry_run(
        "prune", "--model", tiny_folder, "--recipe", recipe, "-o", out, *SMALL, "--dry-run",
        "--json", tmp_path / "found.json",
    )  # fmt: skip
    assert not out.parent.exists() or not list(out.parent.iterdir())
    assert found["seconds"] > 0 and found["disk_bytes"] > 0
    assert {"masking", "measuring", "perplexity"} <= set(found["seconds_of"])
    assert ("training" in found["seconds_of"]) == (recipe == "best")
    assert "on cpu (no accelerator was found)" in found["where"] or torch.cuda.is_available()


def test_other_commands_have_a_dry_run_too(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text(
        "methods: [wanda, ria]\nseeds: [0, 1]\ncalibration: builtin\nnsamples: 2\nseqlen: 32\n"
        "eval_data: builtin\neval_windows: 2\n"
    )
    results = tmp_path / "sweep.jsonl"
    dry_run("sweep", "--model", tiny_folder, "--grid", tmp_path / "grid.yaml", "-o", results,
            "--dry-run")  # fmt: skip
    assert not results.exists()
    dry_run("eval", "--model", tiny_folder, "--data", "builtin", "--seqlen", "32", "--windows",
            "2", "--dry-run")  # fmt: skip
    dry_run("fed", "prune", "--model", tiny_folder, "--clients", "2", "-o", tmp_path / "fed",
            *SMALL, "--dry-run")  # fmt: skip
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    dry_run("compare", tiny_folder, other, "--seqlen", "32", "--windows", "2", "--dry-run")
    dry_run("recommend", "--model", tiny_folder, "--size", "70%", "--nsamples", "2", "--seqlen",
            "16", "--eval-windows", "2", "-o", tmp_path / "tried.jsonl", "--dry-run")  # fmt: skip
    assert not (tmp_path / "tried.jsonl").exists()
    dry_run("pack", tiny_folder, tmp_path / "packed", "--dry-run")
    assert not (tmp_path / "packed").exists() and not (tmp_path / "fed").exists()


def test_a_run_says_so_first_and_its_bits_are_those_of_one_that_does_not(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.named("balanced").with_changes(calibration="builtin", nsamples=4, seqlen=32)
    told: list[str] = []

    def prune(name: str) -> bytes:
        job = pruning.Job(str(tiny_folder), recipe, tmp_path / name, evaluate=False, prompts=())
        pruning.prune(job, told.append)
        return (tmp_path / name / "model.safetensors").read_bytes()

    first = prune("told")
    at = next(n for n, line in enumerate(told) if line.startswith("Takes about "))
    assert at < next(n for n, line in enumerate(told) if line.startswith("Pruning: "))
    monkeypatch.setattr(pruning, "foresee", lambda *_: [])
    assert prune("silent") == first


def test_a_run_without_room_ends_before_it_writes(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = Capacity(memory=-(10**12), disk=10**12)
    monkeypatch.setattr(Capacity, "of", lambda *_: none)
    recipe = Recipe("wanda", calibration="builtin", nsamples=2, seqlen=32)
    job = pruning.Job(str(tiny_folder), recipe, tmp_path / "out", evaluate=False)
    with pytest.raises(SympruneError, match="The run needs about"):
        pruning.prune(job)
    assert not (tmp_path / "out").exists()


def test_time_is_told_by_the_clock_that_is_given(tiny_folder: Path, tmp_path: Path) -> None:
    ticks = iter(range(10**6))
    recipe = Recipe("wanda", calibration="builtin", nsamples=2, seqlen=32)
    job = pruning.Job(str(tiny_folder), recipe, tmp_path / "out", evaluate=False)
    found = forecast(job, clock=lambda: float(next(ticks)))
    assert found.seconds["measuring"] == 2 * 2 * 0.5  # two blocks, two windows timed in one tick
    assert found.total == found.spent + sum(found.seconds.values())
