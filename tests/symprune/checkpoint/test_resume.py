"""A run that was killed goes on, and its files are those of a run that was not.

To the byte: hidden states are kept as they are, so the blocks that are left see the same numbers.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import filling
import killing
import pytest
import torch
from stopping import Killed, die_after
from transformers import AutoModelForCausalLM

from symprune import Recipe
from symprune.checkpoint import resume
from symprune.checkpoint.output_files import OutputFiles
from symprune.errors import SympruneError
from symprune.jobs import pruning

BLOCKS = 6
RECIPE = Recipe(calibration=__file__, nsamples=4, seqlen=32)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep") / "dense"
    config = families.config("llama")
    config.num_hidden_layers = BLOCKS
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="40KB")
    families.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run nobody disturbed."""
    output = tmp_path_factory.mktemp("whole") / "out"
    pruning.prune(job(dense, output))
    return files(output)


def job(dense: Path, output: Path) -> pruning.Job:
    return pruning.Job(str(dense), RECIPE, output, eval_data=__file__, eval_windows=2)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("states_kept", [True, False])
def test_it_goes_on_after_any_block(
    states_kept: bool,
    dense: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resume.HiddenStates, "due", lambda _: states_kept)
    for block in (0, 3, BLOCKS - 1):
        with monkeypatch.context() as patch:
            die_after(block, patch)
            with pytest.raises(Killed):
                pruning.prune(job(dense, tmp_path / "out"))
        kept = list(resume.work_folder(tmp_path / "out").glob("hidden-*"))
        assert len(kept) == int(states_kept) and not (tmp_path / "out").exists()
    told: list[str] = []
    pruning.prune(job(dense, tmp_path / "out"), told.append)
    assert any(f"after block {BLOCKS} of {BLOCKS}" in line for line in told)
    assert files(tmp_path / "out") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("family", ["gemma4", "zamba2"])
def test_it_goes_on_where_blocks_are_given_more_than_hidden_states(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4's later layers read what earlier ones left; Zamba 2's read the embedded tokens."""
    dense = tmp_path / "dense"
    families.model(family).to(torch.bfloat16).save_pretrained(dense)
    families.tokenizer().save_pretrained(dense)
    pruning.prune(job(dense, tmp_path / "whole"))
    monkeypatch.setattr(resume.HiddenStates, "due", lambda _: True)
    with monkeypatch.context() as patch:
        die_after(2, patch)
        with pytest.raises(Killed):
            pruning.prune(job(dense, tmp_path / "out"))
    pruning.prune(job(dense, tmp_path / "out"))
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_finished_blocks_are_not_pruned_again(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        die_after(3, patch)
        with pytest.raises(Killed):
            pruning.prune(job(dense, tmp_path / "out"))
    seen: list[dict[str, Any]] = []
    record = pruning.prune(job(dense, tmp_path / "out"), show=seen.append)
    assert {step["block"] for step in seen if step["stage"] == "mask"} == {5, 6}
    assert len(record["layers"]) == 7 * BLOCKS


def test_kill_9_at_random_times_leaves_the_same_bytes(
    dense: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    arguments = [dense, tmp_path / "out", tmp_path / "first", __file__]
    command = [sys.executable, killing.__file__, *(str(argument) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3
    assert files(tmp_path / "first") == files(tmp_path / "out") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "out"]


@pytest.fixture
def begun(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pruning.Job:
    """A job that was killed after its second block."""
    with monkeypatch.context() as patch:
        die_after(1, patch)
        with pytest.raises(Killed):
            pruning.prune(job(dense, tmp_path / "out"))
    return job(dense, tmp_path / "out")


def test_a_changed_job_is_refused_and_the_difference_named(
    begun: pruning.Job, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("lambda " * 500)
    changes = {
        r"recipe.sparsity \(0.5, now 0.6\)": {"recipe": RECIPE.with_changes(sparsity=0.6)},
        r"recipe.method \(ria, now wanda\)": {"recipe": RECIPE.with_changes(method="wanda")},
        "calibration tokens": {"recipe": RECIPE.with_changes(calibration=str(text))},
        r"dtype \(auto, now float32\)": {"dtype": "float32"},
        r"report_error \(False, now True\)": {"report_error": True},
    }
    before = files(resume.work_folder(tmp_path / "out") / "output")
    for said, change in changes.items():
        with pytest.raises(SympruneError, match=f"unfinished run .* differs in .*{said}"):
            pruning.prune(replace(begun, **change))  # type: ignore[arg-type]
    assert files(resume.work_folder(tmp_path / "out") / "output") == before


def test_a_changed_model_is_refused_and_its_file_named(
    begun: pruning.Job, dense: Path, tmp_path: Path
) -> None:
    shard = sorted(dense.glob("model-*.safetensors"))[0]
    about = shard.stat()
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    with pytest.raises(SympruneError, match=f"differs in model.{shard.name}"):
        pruning.prune(begun)
    os.utime(shard, ns=(about.st_atime_ns, about.st_mtime_ns))
    pruning.prune(begun)


def test_restart_throws_the_unfinished_run_away(
    begun: pruning.Job, whole: dict[str, bytes]
) -> None:
    other = replace(begun, recipe=RECIPE.with_changes(method="wanda"), restart=True)
    record = pruning.prune(other)
    assert record["recipe"]["method"] == "wanda" and len(record["layers"]) == 7 * BLOCKS
    written = files(begun.folder)
    assert written.keys() == whole.keys() and written["masks.safetensors"] != whole


def test_a_full_disk_is_one_sentence_and_can_be_gone_on_from(
    dense: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = OutputFiles.write_block

    def full(self: OutputFiles, index: int, *rest: object) -> dict[str, str]:
        if index == 2:
            monkeypatch.setattr(
                "os.pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
            )
        return write(self, index, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", os.pwrite)
        patch.setattr(OutputFiles, "write_block", full)
        with pytest.raises(SympruneError, match=r"disk is full.*make room.*after block 2"):
            pruning.prune(job(dense, tmp_path / "out"))
    monkeypatch.undo()
    pruning.prune(job(dense, tmp_path / "out"))
    assert files(tmp_path / "out") == whole


def test_a_disk_that_really_fills_up(dense: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    own = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "disk")]
    if not shutil.which("unshare") or subprocess.run([*own, *mount], check=False).returncode:
        pytest.skip("This system does not let a user mount a disk.")
    arguments = [dense, __file__, tmp_path / "disk", tmp_path / "copy"]
    command = [*own, sys.executable, filling.__file__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        f"The disk is full: {tmp_path}/disk/out is not finished; make room and run the same "
        "command again to go on after block 2.\n"
    )
    assert files(tmp_path / "copy") == whole


def test_a_file_that_may_not_grow_is_one_sentence_and_can_be_gone_on_from(
    dense: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """The system itself refuses to write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(figures: dict[str, Any]) -> None:
        if figures["block"] == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))

    try:
        with pytest.raises(SympruneError, match=r"File too large; run the same.*after block 2\.$"):
            pruning.prune(job(dense, tmp_path / "out"), show=limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    pruning.prune(job(dense, tmp_path / "out"))
    assert files(tmp_path / "out") == whole


def test_two_processes_do_not_write_one_output(tmp_path: Path) -> None:
    with resume.workspace(tmp_path / "out") as work:
        (work / resume.OUTPUT).mkdir()
        with (
            pytest.raises(SympruneError, match="Another process"),
            resume.workspace(tmp_path / "out"),
        ):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_hidden_states_are_kept_less_often_when_that_takes_long(tmp_path: Path) -> None:
    states = resume.HiddenStates(tmp_path)
    hidden = torch.randn(3, 4, 8).bfloat16()
    assert states.due()
    states.keep(1, hidden)
    states._cost = 1e6
    assert not states.due()
    again = torch.empty_like(hidden)
    assert states.restore(1, again)
    assert torch.equal(again, hidden)
    whole = states.path(1).read_bytes()
    for damaged in (b"short", whole[:-1], whole + b"x", b"x" + whole[1:]):
        states.path(1).write_bytes(damaged)
        assert not states.restore(1, again)
