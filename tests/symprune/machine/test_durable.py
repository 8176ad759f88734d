"""Files that must not be lost: the old content or the new, and onto the disk in the right order."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from disk_steps import record_steps

from symprune import MaskSet, Recipe
from symprune.errors import SympruneError
from symprune.machine import durable


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return record_steps(monkeypatch)


def test_a_file_is_on_the_disk_before_it_has_its_name_and_the_name_is_afterwards(
    tmp_path: Path, steps: list[str]
) -> None:
    durable.write_text(tmp_path / "a.json", "{}")
    assert steps == ["sync .a.json.new", "rename .a.json.new a.json", f"sync {tmp_path.name}"]
    assert (tmp_path / "a.json").read_text() == "{}"


def test_what_users_save_is_written_durably(tmp_path: Path, steps: list[str]) -> None:
    masks = MaskSet()
    masks["weight"] = torch.tensor([[True, False], [False, True]])
    masks.save(tmp_path / "masks.safetensors")
    Recipe().save(tmp_path / "recipe.yaml")
    assert [step for step in steps if step.startswith("sync .")] == [
        "sync .masks.safetensors.new",
        "sync .recipe.yaml.new",
    ]


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    durable.write_text(path, "old")

    def parts() -> Iterator[bytes]:
        yield b"ne"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        durable.write_durably(path, parts())
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_private_file_is_its_owners_only(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    durable.write_tensors(path, {"a": torch.ones(2)}, mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    durable.write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_text() == "new"


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR)
    durable.write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_a_line_takes_the_place_of_one_cut_short(tmp_path: Path, steps: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    durable.append_line(path, "1")
    path.write_text("1\n2")
    durable.append_line(path, "3")
    assert path.read_text() == "1\n3\n"
    assert steps == ["sync a.jsonl", f"sync {tmp_path.name}"] * 2


def test_a_full_disk_is_one_sentence_wherever_it_is_met(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    said = durable.explain(tmp_path, full)
    assert isinstance(said, SympruneError) and str(said) == (
        f"The disk is full: {tmp_path} was not written."
    )
    assert str(durable.explain(tmp_path, full, "try again")) == (
        f"The disk is full: {tmp_path} is not finished; make room and try again."
    )
    other = ValueError("no")
    assert durable.explain(tmp_path, other) is other
