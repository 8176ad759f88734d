"""Windows that the dense model writes itself, in memory and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch

import symprune
from symprune import Recipe, SympruneError, fed
from symprune.checkpoint.load import load_model
from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.engine.text import self_written
from symprune.engine.text.self_written import choose_beginnings, write_windows
from symprune.jobs import own_text, pruning
from symprune.jobs.sweep import Grid, Sweep
from symprune.machine import memory
from symprune.models import hub

TEXT: dict[str, Any] = {"calibration": "builtin", "nsamples": 2, "seqlen": 16}
RECIPE = Recipe(method="wanda", self_samples=3, **TEXT)


class Killed(BaseException):
    """Stands for a process that ends here, without a chance to tidy up."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    families.model().save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".safetensors", "")}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma3", "falcon-h1"])
def test_windows_go_on_from_calibration_text_and_are_as_long(family: str) -> None:
    model, tokens = families.model(family), families.tokens(2)
    written = write_windows(model, tokens, 5, seed=0)
    assert written.shape == (5, tokens.shape[1])
    begun = choose_beginnings(tokens, 5)
    assert torch.equal(written[:, : begun.shape[1]], begun)
    assert torch.equal(written, write_windows(model, tokens, 5, seed=0))
    assert not torch.equal(written, write_windows(model, tokens, 5, seed=1))


@pytest.mark.parametrize(("family", "kept"), [("llama", 2), ("gpt2", 4), ("gemma3", 2)])
def test_as_many_windows_are_written_together_as_have_room(
    family: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kept: heads of 8 numbers whose keys and values are remembered, in two blocks, in fp32."""
    model, tokens, together = families.model(family), families.tokens(2), list[int]()
    window = 2 * 2 * kept * 8 * 16 * 4
    assert self_written.size_of_cache(model, 16) == window
    assert self_written.windows_at_once(model, 16) == self_written.AT_ONCE
    go_on = self_written._continue

    def count(model: Any, begun: torch.Tensor, missing: int) -> torch.Tensor:
        together.append(len(begun))
        return go_on(model, begun, missing)

    monkeypatch.setattr(self_written, "_continue", count)
    for room, expected in ((3 * window + 1, [3, 2]), (1, [1] * 5), (2**40, [5])):
        monkeypatch.setattr(self_written, "CACHE", room)
        assert write_windows(model, tokens, 5, seed=0).shape == (5, 16)
        assert together == expected
        together.clear()


def test_beginnings_are_of_all_windows_in_turn_at_different_places() -> None:
    tokens = torch.arange(2 * 256).view(2, 256)
    begun = choose_beginnings(tokens, 5)
    assert begun.shape == (5, 32)
    assert begun[:, 0].tolist() == [0, 256, 74, 330, 149]
    assert choose_beginnings(tokens[:, :8], 1).shape == (1, 2)


def test_every_window_begins_with_bos_where_the_others_do() -> None:
    written = write_windows(families.model(), families.tokens(2), 5, seed=0, bos=7)
    assert (written[:, 0] == 7).all()


def test_writing_draws_nothing_from_anybody_elses_randomness() -> None:
    model, tokens = families.model(), families.tokens(2)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    write_windows(model, tokens, 1, seed=0)
    assert torch.equal(torch.rand(1), expected)


def test_what_is_written_is_calibrated_on() -> None:
    model, tokenizer = families.model(), families.tokenizer()
    report = symprune.prune(model, tokenizer, RECIPE)
    assert {layer.tokens for layer in report.layers} == {(2 + 3) * 16}
    assert "3 windows of its own" in RECIPE.describe()


@pytest.mark.parametrize("inputs", ["pruned", "dense"])
def test_where_blocks_are_trained_only_training_reads_them(inputs: str) -> None:
    """Masks are those of the calibration text; what is trained is not."""
    plain = RECIPE.with_changes(self_samples=None, inputs=inputs)
    trained = {"name": "block", "epochs": 1}
    masked, without, with_them = (families.model() for _ in range(3))
    reports = [
        symprune.prune(model, families.tokenizer(), recipe)
        for model, recipe in (
            (masked, plain),
            (without, plain.with_changes(reconstruct=trained)),
            (with_them, plain.with_changes(reconstruct=trained, self_samples=3)),
        )
    ]
    assert all({layer.tokens for layer in report.layers} == {2 * 16} for report in reports)
    first = [name for name in reports[0].masks if ".layers.0." in name]
    for name in first:
        assert torch.equal(reports[0].masks[name], reports[2].masks[name])
    found, other = (dict(model.named_parameters()) for model in (without, with_them))
    assert any(not torch.equal(found[name], other[name]) for name in first)


@pytest.mark.parametrize("reconstruct", [None, {"name": "block", "epochs": 1}])
def test_a_model_on_disk_writes_what_one_in_memory_does(
    reconstruct: dict[str, Any] | None, folder: Path, tmp_path: Path
) -> None:
    recipe = RECIPE.with_changes(reconstruct=reconstruct)
    pruning.prune(pruning.Job(str(folder), recipe, tmp_path / "out", evaluate=False))
    model = load_model(hub.resolve(str(folder)))
    symprune.prune(model, hub.load_tokenizer(hub.resolve(str(folder))), recipe)
    written = load_model(hub.resolve(str(tmp_path / "out"))).state_dict()
    assert all(torch.equal(each, written[name]) for name, each in model.state_dict().items())


def test_a_killed_run_does_not_write_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruning.prune(pruning.Job(str(folder), RECIPE, tmp_path / "whole", evaluate=False))
    job = pruning.Job(str(folder), RECIPE, tmp_path / "out", evaluate=False)

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
    monkeypatch.setattr(own_text, "write_windows", die)
    pruning.prune(job)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_cells_of_a_sweep_have_their_own_windows(tmp_path: Path) -> None:
    grid = Grid(methods=["wanda"], eval_data=__file__, eval_windows=1, self_samples=3, **TEXT)
    job = Sweep(families.model(), families.tokenizer(), "m", grid, tmp_path / "results")
    plain = Grid(methods=["wanda"], eval_data=__file__, eval_windows=1, **TEXT)
    with_them, without = job.run(recipes=[*grid.recipes(), *plain.recipes()])
    model = families.model()
    symprune.prune(model, families.tokenizer(), RECIPE)
    assert with_them["recipe"]["self_samples"] == 3 and "self_samples" not in without["recipe"]
    assert with_them["perplexity"] != without["perplexity"]


def test_a_model_that_cannot_write_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.model()
    monkeypatch.setattr(type(model), "can_generate", lambda _: False)
    with pytest.raises(SympruneError, match="cannot write text: pass --self-samples 0"):
        symprune.prune(model, families.tokenizer(), RECIPE)


def test_a_model_that_does_not_fit_as_a_whole_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free", lambda _: 1000)
    with pytest.raises(SympruneError, match="the model must be in memory as a whole"):
        pruning.prune(pruning.Job(str(folder), RECIPE, tmp_path / "out", evaluate=False))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("count", [-1, 1.5, True, "3", 10**7])
def test_a_number_of_windows_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(SympruneError, match="self_samples must be a whole number"):
        Recipe(self_samples=count)
    assert Recipe(self_samples=0) == Recipe()


def test_federated_pruning_says_that_clients_write_nothing() -> None:
    with pytest.raises(SympruneError, match="--self-samples"):
        fed.prune(families.model(), [families.tokens(), families.tokens(seed=1)], RECIPE)
