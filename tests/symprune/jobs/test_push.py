"""Pushing to a stand-in for the hub: what arrives, who may read it, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as constants
import pytest
from hub_server import TOKEN, Hub, serve

from symprune import Recipe
from symprune.errors import SympruneError
from symprune.jobs import pruning
from symprune.jobs.sharing.push import Target, push


@pytest.fixture(scope="module")
def pruned(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "out"
    pruning.prune(pruning.Job(str(tiny_folder), Recipe("magnitude"), folder, evaluate=False))
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield found


def target(name: str = "sparse", private: bool = True, **others: str) -> Target:
    return Target(name, private, **{"token": TOKEN, **others})


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_pushed_arrives_to_the_byte_and_privately(hub: Hub, pruned: Path) -> None:
    done = push(pruned, target())
    assert done["name"] == "ada/sparse" and done["files"] == len(files(pruned))
    assert hub.repositories["ada/sparse"].private
    assert hub.files("ada/sparse") == files(pruned)
    push(pruned, target("open", private=False))
    assert not hub.repositories["ada/open"].private


def test_other_files_in_the_folder_stay_there(hub: Hub, pruned: Path, tmp_path: Path) -> None:
    shutil.copytree(pruned, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    push(tmp_path / "out", target())
    assert hub.files("ada/sparse") == files(pruned)


def test_the_token_is_in_no_file_and_no_body(hub: Hub, pruned: Path) -> None:
    push(pruned, target())
    sent = b"".join([*hub.bodies, *hub.files("ada/sparse").values()])
    assert TOKEN.encode() not in sent and TOKEN not in repr(target())


def test_a_push_that_was_cut_off_goes_on(hub: Hub, pruned: Path) -> None:
    hub.takes = 1
    with pytest.raises(SympruneError, match=r"500.*out is whole: the same command goes on"):
        push(pruned, target())
    assert hub.uploads == 1 and hub.files("ada/sparse") == {}
    hub.takes = None
    push(pruned, target())
    assert hub.uploads == 2 and hub.files("ada/sparse") == files(pruned)


def test_a_branch_is_made_and_main_is_left_alone(hub: Hub, pruned: Path) -> None:
    push(pruned, target(revision="half", message="Half of it"))
    assert hub.files("ada/sparse", "half") == files(pruned) and hub.files("ada/sparse") == {}
    assert hub.repositories["ada/sparse"].messages == ["Half of it"]


def test_what_verify_refuses_is_not_pushed(hub: Hub, pruned: Path, tmp_path: Path) -> None:
    shutil.copytree(pruned, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(SympruneError, match=r"1 file changed.*nothing was pushed"):
        push(tmp_path / "out", target())
    with pytest.raises(SympruneError, match=r"no checksums\.json"):
        push(pruned.parent, target())
    assert hub.asked == []


def test_an_edited_card_is_pushed_as_it_is(hub: Hub, pruned: Path, tmp_path: Path) -> None:
    shutil.copytree(pruned, tmp_path / "out")
    (tmp_path / "out" / "README.md").write_text("# Mine")
    push(tmp_path / "out", target())
    assert hub.files("ada/sparse")["README.md"] == b"# Mine"


def test_refusals_are_sentences(hub: Hub, pruned: Path) -> None:
    with pytest.raises(SympruneError, match=r"does not let you write to eve/x \(You have no right"):
        push(pruned, target("eve/x"))
    with pytest.raises(SympruneError, match="does not accept the token"):
        push(pruned, target(token="wrong"))
    with pytest.raises(SympruneError, match="not a name"):
        push(pruned, target("a/b/c"))
    hub.role = "read"
    with pytest.raises(SympruneError, match="can only read"):
        push(pruned, target())
    assert hub.repositories == {}


def test_what_everybody_reads_takes_nothing_private(hub: Hub, pruned: Path) -> None:
    push(pruned, target(private=False))
    with pytest.raises(SympruneError, match="everybody can read it: pass --public"):
        push(pruned, target())


def test_weights_of_another_model_are_not_left_beside(hub: Hub, pruned: Path) -> None:
    push(pruned, target())
    hub.files("ada/sparse")["model-00002-of-00002.safetensors"] = b"old"
    hub.files("ada/sparse")["figure.png"] = b"theirs"
    with pytest.raises(SympruneError, match=r"has model-00002-of-00002\.safetensors, which"):
        push(pruned, target())


def test_no_hub_is_said_in_a_sentence(pruned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve() as gone:
        pass
    monkeypatch.setattr(constants, "ENDPOINT", gone.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(SympruneError, match="cannot be reached"):
        push(pruned, target())


@pytest.mark.slow
def test_the_commands_push_through_hf_endpoint(tiny_folder: Path, tmp_path: Path) -> None:
    """`prune --push-to-hub`, in a process of its own, with the token from the environment; what
    the hub has is repeated from there."""
    with serve() as hub:
        environment = hub.environment(tmp_path / "home", HF_TOKEN=TOKEN, OMP_NUM_THREADS="1")

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "symprune", *arguments]
            return subprocess.run(
                command, env=environment, cwd=tmp_path, capture_output=True, text=True
            )

        asked = ["prune", "-m", str(tiny_folder), "--method", "magnitude", "--no-eval"]
        refused = run(*asked, "-o", "no", "--push-to-hub", "ada/a b")
        assert refused.returncode == 2 and "not a name" in refused.stderr
        assert not (tmp_path / "no").exists()
        done = run(*asked, "-o", "out", "--push-to-hub", "sparse")
        assert done.returncode == 0, done.stderr
        assert f"{hub.url}/ada/sparse" in done.stdout
        assert hub.files("ada/sparse") == files(tmp_path / "out")
        assert TOKEN not in done.stdout + done.stderr
        again = run("repeat", "ada/sparse", "-o", "again")
        assert again.returncode == 0, again.stderr
        assert (
            f"all {len(json.loads(hub.files('ada/sparse')['checksums.json'])['files'])} files"
            in (again.stdout)
        )
        assert files(tmp_path / "again") == files(tmp_path / "out")
