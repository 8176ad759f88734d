"""No option deletes what is not symprune's, and no planted folder is emptied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from symprune.checkpoint import output_folder, resume
from symprune.checkpoint.record import write_record
from symprune.cli import main
from symprune.errors import SympruneError
from symprune.machine import work_folder

SMALL = [
    "--calibration",
    "builtin",
    "--nsamples",
    "2",
    "--seqlen",
    "32",
    "--no-eval",
    "--no-samples",
]


def symprune(*arguments: str | Path) -> str:
    """Run a command in this process; a sentence for the user comes as its exception."""
    result = CliRunner().invoke(main.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def pruned(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("out") / "pruned"
    symprune("prune", "--model", tiny_folder, "--output", output, *SMALL)
    return output


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for name, content in contents(folder).items():
        (to / name).write_bytes(content)
    return to


def test_force_keeps_a_folder_with_the_users_own_files(tiny_folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("precious")
    with pytest.raises(SympruneError, match="was not written by symprune"):
        symprune("prune", "--model", tiny_folder, "-o", mine, "--force", *SMALL)
    assert contents(mine) == {"thesis.tex": b"precious"}
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_force_replaces_what_symprune_wrote(
    tiny_folder: Path, pruned: Path, tmp_path: Path
) -> None:
    output = copy(pruned, tmp_path / "out")
    (output / "config.json").unlink()
    symprune("prune", "--model", tiny_folder, "-o", output, "--force", *SMALL)
    assert contents(output) == contents(pruned)
    packed = tmp_path / "packed"
    for _ in range(2):
        symprune("pack", pruned, packed, "--force")
    symprune("unpack", packed, output, "--force")
    assert contents(output) == contents(pruned)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "packed"}


def test_force_keeps_an_output_that_the_user_added_to(
    tiny_folder: Path, pruned: Path, tmp_path: Path
) -> None:
    output = copy(pruned, tmp_path / "out")
    (output / "notes.txt").write_text("precious")
    with pytest.raises(SympruneError, match=r"holds notes\.txt, which symprune did not write"):
        symprune("prune", "--model", tiny_folder, "-o", output, "--force", *SMALL)
    assert (output / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize("where", [".", "..", "../here", "deeper/.."])
def test_force_keeps_the_current_folder(
    where: str, tiny_folder: Path, pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = copy(pruned, tmp_path / "here")
    (here / "deeper").mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(SympruneError, match="is or holds the current folder"):
        symprune("prune", "--model", tiny_folder, "-o", where, "--force", *SMALL)
    assert contents(here) == contents(pruned)


def test_force_keeps_what_is_read(pruned: Path, tmp_path: Path) -> None:
    model = copy(pruned, tmp_path / "model")
    link = tmp_path / "link"
    link.symlink_to(model)
    for output in (model, tmp_path, link):
        with pytest.raises(SympruneError, match="which is read"):
            symprune("prune", "--model", model, "-o", output, "--force", *SMALL)
    with pytest.raises(SympruneError, match="which is read"):
        symprune("pack", model, model, "--force")
    with pytest.raises(SympruneError, match="which is read"):
        symprune("unpack", model, model, "--force")
    text = model / "text.txt"
    text.write_text("def f(x): return x\n" * 500)
    options = ["--nsamples", "2", "--seqlen", "32", "--no-eval", "--force"]
    with pytest.raises(SympruneError, match=r"text\.txt, which is read"):
        symprune("prune", "--model", pruned, "-o", model, "--calibration", text, *options)
    with pytest.raises(SympruneError, match="which is read"):
        symprune("refine", "--model", pruned, "--masks", model, "-o", model, *options)
    text.unlink()
    assert contents(model) == contents(pruned)


def test_force_does_not_go_through_a_link(tiny_folder: Path, pruned: Path, tmp_path: Path) -> None:
    output = copy(pruned, tmp_path / "out")
    (tmp_path / "link").symlink_to(output)
    with pytest.raises(SympruneError, match="is a link"):
        symprune("prune", "--model", tiny_folder, "-o", tmp_path / "link", "--force", *SMALL)
    assert contents(output) == contents(pruned)


def test_what_appeared_during_the_work_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "out"

    def work() -> None:
        with output_folder.whole_folder(output) as folder:
            (folder / "new").touch()
            output.mkdir()
            (output / "mine").write_text("precious")

    with pytest.raises(SympruneError, match="was not written by symprune"):
        work()
    assert contents(output) == {"mine": b"precious"}


@pytest.mark.parametrize("content", ["my notes\n", "", '{"key": "cut'])
def test_a_sweep_adds_only_to_results(content: str, tiny_folder: Path, tmp_path: Path) -> None:
    grid, out = tmp_path / "grid.yaml", tmp_path / "notes.txt"
    grid.write_text(
        "methods: [magnitude]\ncalibration: builtin\nseqlen: 32\neval_data: builtin\n"
        "eval_windows: 1\n"
    )
    out.write_text(content)
    command = ("sweep", "--model", tiny_folder, "--grid", grid, "-o")
    with pytest.raises(SympruneError, match="is a folder"):
        symprune(*command, tmp_path)
    if not content.startswith("my"):
        symprune(*command, out)
        assert json.loads(out.read_text())["key"]
        return
    with pytest.raises(SympruneError, match="was not written by a sweep"):
        symprune(*command, out)
    assert out.read_text() == content


def test_a_report_replaces_only_a_report(pruned: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<p>mine</p>")
    with pytest.raises(SympruneError, match="not a page of symprune"):
        symprune("report", pruned, "-o", page, "--force")
    assert page.read_text() == "<p>mine</p>"
    page.unlink()
    for _ in range(2):
        symprune("report", pruned, "-o", page, "--force")


def plant(work: Path, how: str, victim: Path) -> None:
    """Leave in the place of a work folder what a stranger might."""
    if how == "a link":
        work.symlink_to(victim)
        return
    work.mkdir()
    (work / "precious").write_text("precious")
    if how == "a link inside a marked folder":
        (work / work_folder.LOCK).write_bytes(work_folder.MARK)
        (work / resume.OUTPUT).symlink_to(victim)
    if how == "a link for a lock":
        (victim / "precious").write_bytes(work_folder.MARK)
        (work / work_folder.LOCK).symlink_to(victim / "precious")


@pytest.mark.parametrize(
    "how",
    ["a link", "a foreign folder", "a link inside a marked folder", "a link for a lock"],
)
@pytest.mark.parametrize("restart", [False, True])
def test_a_planted_work_folder_is_refused_and_kept(
    how: str, restart: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    victim, output = tmp_path / "victim", tmp_path / "out"
    victim.mkdir()
    (victim / "precious").write_text("precious")
    work = resume.work_folder(output)
    plant(work, how, victim)
    before = contents(victim), contents(work)
    more = ["--restart"] if restart else []
    with pytest.raises(SympruneError, match=r"\.out\.partial was not left by a run of symprune"):
        symprune("prune", "--model", tiny_folder, "-o", output, *SMALL, *more)
    assert (contents(victim), contents(work)) == before and not output.exists()


@pytest.mark.parametrize(
    "content",
    [
        '{"run": {}}',
        "[]",
        "7",
        '{"run": {}, "finished": "6", "hidden": 0, "layers": [], "notes": [], "seconds": {}, '
        '"values": {}}',
        "[" * 100_000,
    ],
    ids=["fields are missing", "a list", "a number", "a text for a number", "nested deeply"],
)
def test_progress_that_is_not_ours_is_a_sentence(
    content: str, tiny_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    work = resume.work_folder(output)
    work.mkdir()
    (work / work_folder.LOCK).write_bytes(work_folder.MARK)
    (work / resume.FILE).write_text(content)
    with pytest.raises(SympruneError, match=r"progress\.json (was not written|cannot be read)"):
        symprune("prune", "--model", tiny_folder, "-o", output, *SMALL)


def test_an_empty_folder_is_nobodys(tmp_path: Path) -> None:
    output_folder.check_output(tmp_path, force=True)
    write_record(tmp_path, {})
    output_folder.check_output(tmp_path, force=True)


def leave(work: Path, name: str, marked: bool = True) -> Path:
    """What a process that was killed leaves beside an output."""
    (work / "folder").mkdir(parents=True)
    (work / "folder" / name).write_text("left")
    if marked:
        (work / work_folder.LOCK).write_bytes(work_folder.MARK)
    return work


def test_what_a_killed_process_left_is_removed_by_the_next(pruned: Path, tmp_path: Path) -> None:
    symprune("pack", pruned, tmp_path / "out")
    leave(tmp_path / ".out.new.abc", "half")
    leave(tmp_path / ".out.old.abc", "whole")
    mine = leave(tmp_path / ".out.new.mine", "precious", marked=False)
    symprune("pack", pruned, tmp_path / "out", "--force")
    assert {path.name for path in tmp_path.iterdir()} == {"out", mine.name}
    assert (mine / "folder" / "precious").exists()


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with work_folder.temporary(output, work_folder.NEW) as folder:
        work_folder.remove_left_over(output)
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_was_moved_away_and_not_replaced_is_put_back(tmp_path: Path) -> None:
    leave(tmp_path / ".out.old.abc", "whole")
    work_folder.remove_left_over(tmp_path / "out")
    assert contents(tmp_path / "out") == {"whole": b"left"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("able", [True, False])
def test_force_replaces_whether_or_not_the_system_can_swap(
    able: bool, pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not able:
        monkeypatch.setattr(work_folder, "swap", lambda *_: False)
    output = tmp_path / "out"
    for _ in range(2):
        symprune("pack", pruned, output, "--force")
    assert (output / "packed.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_kill_right_after_the_swap_refuses_no_later_run(
    tiny_folder: Path, pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = copy(pruned, tmp_path / "out")
    command = ("prune", "--model", tiny_folder, "-o", output, "--force", *SMALL)
    swap = work_folder.swap

    class Killed(BaseException):
        """Stands for a process that ends here."""

    def swap_and_die(*folders: Path) -> bool:
        assert swap(*folders)
        monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
        raise Killed

    monkeypatch.setattr(work_folder, "swap", swap_and_die)
    with pytest.raises(Killed):
        symprune(*command, "--sparsity", "0.25")
    monkeypatch.undo()
    new = contents(output)
    assert new["model.safetensors"] != contents(pruned)["model.safetensors"]
    symprune(*command, "--sparsity", "0.25")
    assert contents(output) == new
    symprune(*command)
    assert contents(output) == contents(pruned)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_packed_or_unpacked_does_not_go_into_itself(pruned: Path, tmp_path: Path) -> None:
    mine, packed = copy(pruned, tmp_path / "mine"), tmp_path / "packed"
    symprune("pack", mine, packed)
    for command, folder in (("pack", mine), ("unpack", packed)):
        before = contents(folder)
        with pytest.raises(SympruneError, match=r"lies in .*, which is copied as a whole"):
            symprune(command, folder, folder / "inside")
        assert contents(folder) == before and not any(p.is_dir() for p in folder.iterdir())
