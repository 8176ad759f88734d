"""What writes a folder may be killed at any change of the disk: the folder is whole or not there,
and the next attempt is not refused and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dying
import families
import packed_models
import pytest
from stopping import Killed

from symprune.checkpoint import output_folder, packed, resume
from symprune.errors import SympruneError
from symprune.machine import work_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made")
    packed_models.pruned("smollm").save_pretrained(made / "plain")
    families.tokenizer().save_pretrained(made / "plain")
    packed.pack(made / "plain", made / "packed")
    return made


@pytest.mark.parametrize(
    ("action", "source", "stride"),
    [
        ("pack", "plain", 7),
        ("unpack", "packed", 7),
        ("save", "plain", 5),
        ("copy", "packed", 3),
        ("prune", "plain", 9),
    ],
)
def test_a_kill_at_any_change_of_the_disk_loses_nothing(
    action: str, source: str, stride: int, folders: Path, tmp_path: Path
) -> None:
    kills = {}
    for name, every in (("whole", 0), ("out", stride)):
        arguments = [action, folders / source, tmp_path / name, every]
        command = [sys.executable, dying.__file__, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        kills[name] = int(done.stdout)
    assert kills["whole"] == 0 and kills["out"] >= 5
    whole, out = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("whole", "out")
    )
    assert out == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


@pytest.mark.parametrize("left", ["progress.json", "output", "ready"])
def test_a_kill_while_a_work_folder_is_removed_refuses_no_later_run(
    left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of it goes first."""
    work, output = resume.work_folder(tmp_path / "out"), tmp_path / "out"
    with work_folder.hold(work, output):
        for name in ("output", "ready"):
            (work / name).mkdir()
        (work / "progress.json").write_text("{}")
    unlink, rmdir = Path.unlink, Path.rmdir

    def die_at(path: Path) -> None:
        if path.name == left:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, **more: (die_at(path), unlink(path, **more)))
        patch.setattr("shutil.rmtree", lambda path, **_: (die_at(path), rmdir(path)))
        with pytest.raises(Killed):
            work_folder.remove(work)
    with work_folder.hold(work, output):
        pass
    (work / work_folder.LOCK).unlink()
    with pytest.raises(SympruneError, match="was not left"), work_folder.hold(work, output):
        pass


def test_what_is_in_subfolders_is_listed(tmp_path: Path) -> None:
    with output_folder.whole_folder(tmp_path / "out") as folder:
        (folder / "more").mkdir()
        (folder / "more" / "file").write_text("content")
    assert "more/file" in (tmp_path / "out" / "checksums.json").read_text()
