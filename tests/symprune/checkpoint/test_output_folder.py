"""Output appears whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from disk_steps import record_steps

from symprune.checkpoint import output_folder
from symprune.checkpoint.record import read_record, write_record
from symprune.errors import SympruneError


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "model"
    with output_folder.whole_folder(output) as work:
        (work / "a").write_text("1")
        assert not output.exists()
    assert (output / "a").read_text() == "1"
    assert [path.name for path in output.parent.iterdir()] == ["model"]


def test_a_failure_leaves_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    output = tmp_path / "model"
    output.mkdir()
    (output / "old").write_text("precious")

    def write_half() -> None:
        with output_folder.whole_folder(output) as work:
            (work / "new").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (output / "old").read_text() == "precious"


def test_force_replaces_and_without_it_nothing_is_touched(tmp_path: Path) -> None:
    output = tmp_path / "model"
    output.mkdir()
    (output / "old").touch()
    write_record(output, {})
    with pytest.raises(SympruneError, match="--force"):
        output_folder.check_output(output, force=False)
    with output_folder.whole_folder(output) as work:
        (work / "new").touch()
    assert sorted(path.name for path in output.iterdir()) == ["checksums.json", "new"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(SympruneError, match="disk is full"),
        output_folder.whole_folder(tmp_path / "model"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(SympruneError, match=r"disk of .* is full"):
        output_folder.check_room(tmp_path / "model", 2**62)
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SympruneError, match="not writable"):
        output_folder.check_output(tmp_path / "file" / "model", force=False)
    with pytest.raises(SympruneError, match="a file"):
        output_folder.check_output(tmp_path / "file", force=True)
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o500)
        with pytest.raises(SympruneError, match="not writable"):
            output_folder.check_output(tmp_path / "model", force=False)
        tmp_path.chmod(0o700)


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    (tmp_path / "symprune.json").write_text("{")
    with pytest.raises(SympruneError, match=r"symprune\.json"):
        read_record(tmp_path)


def test_a_folder_is_on_the_disk_before_it_has_its_name_and_the_name_is_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = record_steps(monkeypatch)
    with output_folder.whole_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("a")
        (folder / "more").mkdir()
        (folder / "more" / "b").write_text("b")
    at = done.index("rename folder out")
    assert {"sync a", "sync b", "sync more"} <= set(done[:at])
    assert f"sync {tmp_path.name}" in done[at:]
