"""What changes between a kill and the next attempt is noticed: refused with a sentence, or done
again, and never mixed into the output."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import packed_models
import pytest
import torch
from stopping import Killed, die_after
from transformers import AutoModelForCausalLM

from symprune import Recipe
from symprune.checkpoint import load, resume
from symprune.checkpoint.tensor_files import Shards
from symprune.checkpoint.verify import verify
from symprune.errors import SympruneError
from symprune.jobs import pruning

TEXT = "def f(x): return x\n" * 400
RECIPE = Recipe(nsamples=2, seqlen=16)


def make(folder: Path) -> Path:
    config = families.config("llama")
    config.num_hidden_layers = 4
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="40KB")
    families.tokenizer().save_pretrained(folder)
    return folder


def job(folder: Path, **changes: Any) -> pruning.Job:
    """Everything a job reads is in `folder`, where it may be changed."""
    text = str(folder / "text.txt")
    recipe = RECIPE.with_changes(calibration=text, **changes.pop("recipe", {}))
    settings = {"evaluate": False, "eval_data": str(folder / "held_out.txt"), **changes}
    return pruning.Job(str(folder / "dense"), recipe, folder / "out", **settings)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def files_anywhere(folder: Path) -> dict[str, bytes]:
    """Files without what depends on where they are."""
    found = files(folder)
    del found["checksums.json"]
    place = str(folder.parent).encode()
    return {name: content.replace(place, b"") for name, content in found.items()}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and texts."""
    folder = tmp_path_factory.mktemp("started")
    make(folder / "dense")
    for name in ("text.txt", "held_out.txt"):
        (folder / name).write_text(TEXT)
    return folder


@pytest.fixture
def here(started: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    shutil.copytree(started, tmp_path / "here")
    return tmp_path / "here"


def begin(what: pruning.Job, monkeypatch: pytest.MonkeyPatch, block: int = 1) -> Path:
    """Kill a job after its second block; its work folder."""
    with monkeypatch.context() as patch:
        patch.setattr(resume.HiddenStates, "due", lambda _: True)
        die_after(block, patch)
        with pytest.raises(Killed):
            pruning.prune(what)
    return resume.work_folder(what.folder)


def flip(path: Path, place: int) -> None:
    """Change a bit, and nothing that `ls` shows."""
    about = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def place_of(folder: Path, name: str) -> tuple[Path, int]:
    """The middle of a tensor."""
    entry = Shards(folder, [path.name for path in folder.glob("model-*")]).entries[name]
    return folder / entry.file, entry.start + entry.size // 2


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_changed_file_beside_the_weights_is_named(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(job(here), monkeypatch)
    path = here / "dense" / name
    about = path.stat()
    text = path.read_text()
    path.write_text(text.replace("\n", " \n", 1) if "\n" in text else f"{text} ")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(SympruneError, match=f"differs in files.{name}"):
        pruning.prune(job(here))
    path.write_text(text)
    pruning.prune(job(here))


@pytest.mark.parametrize(
    ("block", "evaluate"),
    [(0, True), (0, False), (3, True)],
    ids=["finished", "pruned", "measured"],
)
def test_weights_that_changed_after_they_were_read_are_noticed(
    block: int, evaluate: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(job(here, evaluate=evaluate), monkeypatch)
    path, place = place_of(here / "dense", f"model.layers.{block}.mlp.up_proj.weight")
    flip(path, place)
    for _ in range(2):
        with pytest.raises(SympruneError, match=f"{path.name} has changed since the unfinished"):
            pruning.prune(job(here, evaluate=evaluate))
    assert not (here / "out").exists()


def test_weights_that_changed_before_they_were_read_are_those_of_a_run_begun_later(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(job(here, evaluate=False), monkeypatch)
    flip(*place_of(here / "dense", "model.layers.3.mlp.up_proj.weight"))
    pruning.prune(job(here, evaluate=False))
    found = files(here / "out")
    shutil.rmtree(here / "out")
    pruning.prune(job(here, evaluate=False))
    assert found == files(here / "out")


def test_weights_that_rot_on_the_disk_are_noticed_when_they_are_read(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no system call wrote shows in no time and no inode."""
    work = begin(job(here, evaluate=True), monkeypatch)
    path, place = place_of(here / "dense", "model.layers.3.mlp.up_proj.weight")
    flip(path, place)
    progress = resume.Progress.open(work, json.loads((work / resume.FILE).read_text())["run"], work)
    about = path.stat()
    progress.files[path.name] = [about.st_ino, about.st_ctime_ns]
    progress.save()
    with pytest.raises(SympruneError, match=f"up_proj.weight in .*{path.name} has changed since"):
        pruning.prune(job(here, evaluate=True))


def test_files_that_were_copied_or_whose_rights_changed_are_the_same(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruning.prune(job(here, evaluate=True))
    whole = files(here / "out")
    shutil.rmtree(here / "out")
    begin(job(here, evaluate=True), monkeypatch)
    shutil.copytree(here / "dense", here / "copy")  # with its times
    shutil.rmtree(here / "dense")
    (here / "copy").rename(here / "dense")
    for path in (here / "dense").iterdir():
        path.chmod(0o600)
    pruning.prune(job(here, evaluate=True))
    assert files(here / "out") == whole


def test_changed_text_to_evaluate_on_is_measured_anew(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(job(here, evaluate=True), monkeypatch)
    (here / "held_out.txt").write_text("lambda y: y + 1\n" * 400)
    found = pruning.prune(job(here, evaluate=True))
    other = pruning.prune(replace(job(here, evaluate=True), output=here / "other"))
    assert found["perplexity"] == other["perplexity"]
    assert files(here / "out") == files(here / "other")


@pytest.mark.parametrize("fitted", [False, True], ids=["calibrated on", "watched"])
def test_changed_text_to_calibrate_on_is_refused(
    fitted: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"update": "lsq"} if fitted else {}
    begin(job(here, recipe=recipe), monkeypatch)
    (here / "text.txt").write_text("lambda y: y + 1\n" * 400)
    said = "watched tokens" if fitted else "calibration tokens"
    with pytest.raises(SympruneError, match=f"differs in .*{said}"):
        pruning.prune(job(here, recipe=recipe))


def damages(work: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """What may happen to what a run has written."""
    output = work / "output"
    for block in range(2):
        path, place = place_of(output, f"model.layers.{block}.mlp.up_proj.weight")
        yield f"block {block}", lambda p=path, n=place: flip(p, n)  # type: ignore[misc]
    masks = Shards(output, ["masks.safetensors"])
    entry = masks.entries["model.layers.1.self_attn.q_proj.weight"]
    yield "a mask", lambda: flip(output / entry.file, entry.start)
    yield "a header", lambda: flip(output / "masks.safetensors", 20)
    yield "a length", lambda: flip(next(output.glob("model-*.safetensors")), 0)
    hidden = next(work.glob("hidden-*"))
    yield "the hidden states", lambda: flip(hidden, 100)
    yield "no hidden states", hidden.unlink
    yield "a file is cut", lambda: os.truncate(output / "masks.safetensors", 100)


NAMES = (
    "block 0", "block 1", "a mask", "a header", "a length", "the hidden states",
    "no hidden states", "a file is cut",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(started: Path) -> dict[str, bytes]:
    pruning.prune(job(started))
    return files_anywhere(started / "out")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_damaged_of_an_unfinished_run_is_done_again(
    name: str, here: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(here / "out", ignore_errors=True)
    work = begin(job(here), monkeypatch)
    dict(damages(work))[name]()
    told: list[str] = []
    pruning.prune(job(here), told.append)
    assert files_anywhere(here / "out") == whole and verify(here / "out").is_whole
    again = {"block 0": 1, "block 1": 2, "a mask": 2, "a file is cut": 1}
    if name in again:
        assert any(f"Block {again[name]} is not as it was written" in line for line in told)
    else:
        assert any("Going on after block 2 of 4" in line for line in told)


@pytest.mark.parametrize("block", [0, 1])
def test_a_damaged_packed_block_is_done_again(
    block: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(here / "out", ignore_errors=True)
    recipe = {"values": "int4"}
    pruning.prune(replace(job(here, recipe=recipe), output=here / "whole"))
    work = begin(job(here, recipe=recipe), monkeypatch)
    part = work / "blocks" / f"block-{block:05}.safetensors"
    flip(part, 30 if block else part.stat().st_size // 2)
    pruning.prune(job(here, recipe=recipe))
    assert files(here / "out") == files(here / "whole")


@pytest.mark.parametrize("what", ["finished", "seconds", "sparsity"])
def test_damaged_progress_is_refused(
    what: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(here / "out", ignore_errors=True)
    path = begin(job(here), monkeypatch) / resume.FILE
    text = path.read_text()
    place = text.index(":", text.index(f'"{what}"')) + 2
    digit = next(n for n in range(place, len(text)) if text[n].isdigit())
    path.write_text(text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :])
    with pytest.raises(SympruneError, match=r"progress\.json (is damaged|was not written)"):
        pruning.prune(job(here))
    pruning.prune(replace(job(here), restart=True))


def test_a_damaged_dense_copy_is_made_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is not in plain safetensors files is pruned from a copy that is."""
    shutil.rmtree(here / "out", ignore_errors=True)
    tokenizer = families.tokenizer()
    shutil.rmtree(here / "dense")
    packed_models.packed("llama").save_pretrained(here / "dense")
    tokenizer.save_pretrained(here / "dense")
    pruning.prune(replace(job(here), output=here / "whole"))
    work = begin(job(here), monkeypatch, block=0)
    copy = next((work / "dense").glob("*.safetensors"))
    loaded: list[object] = []
    load_model = load.load_model
    monkeypatch.setattr(load, "load_model", lambda *a: loaded.append(a) or load_model(*a))
    flip(copy, copy.stat().st_size // 2)
    begin(job(here), monkeypatch, block=1)
    assert len(loaded) == 1
    pruning.prune(job(here))
    assert len(loaded) == 1
    assert files(here / "out") == files(here / "whole")
    begin(replace(job(here), force=True), monkeypatch, block=0)
    flip(next((here / "dense").glob("*.safetensors")), 2000)
    with pytest.raises(SympruneError, match=r"differs in files\.model\.safetensors"):
        pruning.prune(replace(job(here), force=True))
