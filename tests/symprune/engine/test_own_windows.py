"""Calibration on nothing but what the dense model writes: `self`, alone or in a mixture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch

import symprune
from symprune import Recipe, SympruneError, calibration
from symprune.checkpoint.load import load_model
from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.engine.text.self_written import first_token, write_from_nothing, write_missing
from symprune.jobs import own_text, pruning
from symprune.jobs.sweep import Grid, Sweep
from symprune.models import hub

TEXT: dict[str, Any] = {"nsamples": 4, "seqlen": 16}
RECIPE = Recipe(method="wanda", calibration="self", **TEXT)
MIXED = Recipe(method="wanda", calibration="self + builtin", update="lsq", **TEXT)


class Killed(BaseException):
    """Stands for a process that ends here, without a chance to tidy up."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    families.model().save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(hub.resolve(str(folder))).state_dict())


def test_windows_are_written_from_nothing_the_same_for_a_seed() -> None:
    model, said = families.model(), []
    written = write_from_nothing(model, 1, 20, 16, 0, said.append)
    assert written.shape == (20, 16) and (written[:, 0] == 1).all()
    assert torch.equal(written, write_from_nothing(model, 1, 20, 16, 0))
    assert not torch.equal(written, write_from_nothing(model, 1, 20, 16, 1))
    assert said[0].startswith("The dense model writes 20 windows of 16 tokens by itself, about ")
    assert len({tuple(window.tolist()) for window in written}) == 20


def test_the_first_token_is_that_of_a_beginning_else_of_an_end() -> None:
    tokenizer = families.tokenizer()
    assert first_token(tokenizer) == 1
    tokenizer.bos_token = None
    assert first_token(tokenizer) == 2
    tokenizer.eos_token = None
    with pytest.raises(SympruneError, match="no token for the beginning or end"):
        symprune.prune(families.model(), tokenizer, RECIPE)


def test_a_model_is_pruned_on_its_own_text_without_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibration, "text", None)  # a text that is read would be called
    model = families.model()
    report = symprune.prune(model, families.tokenizer(), RECIPE)
    assert {layer.tokens for layer in report.layers} == {4 * 16}
    assert report.sparsity == 0.5


@pytest.mark.parametrize("recipe", [RECIPE, MIXED], ids=["alone", "mixed"])
def test_a_model_on_disk_writes_what_one_in_memory_does(
    recipe: Recipe, folder: Path, tmp_path: Path
) -> None:
    pruning.prune(pruning.Job(str(folder), recipe, tmp_path / "out", evaluate=False))
    model = load_model(hub.resolve(str(folder)))
    symprune.prune(model, hub.load_tokenizer(hub.resolve(str(folder))), recipe)
    written = weights(tmp_path / "out")
    assert all(torch.equal(each, written[name]) for name, each in model.state_dict().items())


def test_the_record_has_each_text_with_the_hash_of_its_windows(
    folder: Path, tmp_path: Path
) -> None:
    found = []
    for number, seed in enumerate((0, 0, 1)):
        job = pruning.Job(
            str(folder), MIXED.with_changes(calibration_seed=seed), tmp_path / f"{number}",
            evaluate=False,
        )  # fmt: skip
        pruning.prune(job)
        found.append(json.loads((job.folder / "symprune.json").read_text())["calibration"])
    assert [(part["source"], part["windows"]) for part in found[0]] == [("self", 2), ("builtin", 2)]
    assert found[0] == found[1]
    assert all(a["digest"] != b["digest"] for a, b in zip(found[0], found[2], strict=True))


def test_a_killed_run_does_not_write_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruning.prune(pruning.Job(str(folder), MIXED, tmp_path / "whole", evaluate=False))
    job = pruning.Job(str(folder), MIXED, tmp_path / "out", evaluate=False)
    finish = StreamedBlocks.finish

    def die(*_: Any) -> None:
        raise Killed

    def finish_and_die(*arguments: Any) -> None:
        finish(*arguments)
        die()

    with monkeypatch.context() as patch:
        patch.setattr(StreamedBlocks, "finish", finish_and_die)
        with pytest.raises(Killed):
            pruning.prune(job)
    monkeypatch.setattr(own_text, "write_from_nothing", die)
    pruning.prune(job)
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert all(torch.equal(each, found[name]) for name, each in expected.items())


def test_another_text_is_another_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its name is the same."""
    mine = tmp_path / "mine.jsonl"
    row = {"text": "the value of an expression " * 20}
    mine.write_text(json.dumps(row))
    recipe = RECIPE.with_changes(calibration=f"{mine}*0.5 + self*0.5")
    job = pruning.Job(str(folder), recipe, tmp_path / "out", evaluate=False)
    finish = StreamedBlocks.finish

    def finish_and_die(*arguments: Any) -> None:
        finish(*arguments)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(StreamedBlocks, "finish", finish_and_die)
        with pytest.raises(Killed):
            pruning.prune(job)
    mine.write_text(json.dumps({"text": "something else now " * 30}))
    with pytest.raises(SympruneError, match="differs in calibration tokens"):
        pruning.prune(job)


def test_cells_of_a_sweep_write_their_own_text(tmp_path: Path) -> None:
    grid = Grid(
        methods=["wanda"], eval_data=__file__, eval_windows=1, calibration="self", **TEXT
    )  # fmt: skip
    job = Sweep(families.model(), families.tokenizer(), "m", grid, tmp_path / "results")
    (cell,) = job.run()
    model = families.model()
    symprune.prune(model, families.tokenizer(), RECIPE)
    assert cell["recipe"]["calibration"] == "self" and cell["sparsity"] == 0.5


def test_federated_pruning_takes_the_clients_text_alone() -> None:
    with pytest.raises(SympruneError, match=r"\(self\) are written by prune, refine and sweep"):
        calibration.calibration_tokens("self", families.tokenizer(), 1, 8, 0)


def test_held_out_windows_are_others() -> None:
    settings = ("self", families.tokenizer(), 8, 16, 0)
    waiting = calibration.calibration_tokens(*settings, own=True)
    held_out = calibration.held_out_tokens(*settings, more=2)
    tokens, others = write_missing(
        families.model(), families.tokenizer(), waiting, held_out, RECIPE
    )  # fmt: skip
    assert others is not None and len(others) == 1 + 2
    rows = {tuple(row) for row in torch.cat([tokens, others]).tolist()}
    assert len(rows) == 8 + 3
