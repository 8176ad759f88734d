"""Permuted models on disk: the bytes of a model in memory, plain for all, and resumable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from stopping import Killed, die_after
from transformers import AutoModelForCausalLM

import symprune
from symprune import Recipe, SympruneError
from symprune.checkpoint import resume
from symprune.checkpoint.load import load_model
from symprune.engine import walk
from symprune.engine.permute.inside import AFTER, BEFORE
from symprune.jobs import pruning
from symprune.jobs.sweep import Grid, Sweep
from symprune.maskset import MaskSet
from symprune.models import hub
from symprune.models.layout import find_layout

TEXT = {"calibration": __file__, "nsamples": 4, "seqlen": 16}
RECIPE = Recipe(method="wanda", pattern="2:4", permute="all", **TEXT)  # type: ignore[arg-type]


def write(family: str, folder: Path) -> Path:
    """A model of three blocks in bfloat16, with norms and biases that differ by channel."""
    config = families.config(family)
    setattr(config, "n_layer" if family == "gpt2" else "num_hidden_layers", 3)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["smollm", "gpt2", "mixtral", "opt"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp(request.param))


def job(folder: Path, output: Path, recipe: Recipe = RECIPE, **options: Any) -> pruning.Job:
    options = {"evaluate": False, "compute_dtype": "float32", **options}
    return pruning.Job(str(folder), recipe, output, **options)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def in_memory(folder: Path, recipe: Recipe) -> Any:
    model = load_model(hub.resolve(str(folder))).float()
    tokenizer = hub.load_tokenizer(hub.resolve(str(folder)))
    blocks = walk.Blocks(find_layout(model), stored=torch.bfloat16)
    symprune.prune(model, tokenizer, recipe, blocks=blocks)
    return model.to(torch.bfloat16)


@pytest.mark.parametrize("changes", [{}, {"update": {"name": "lsq", "rounds": 2}}], ids=str)
def test_streamed_weights_are_those_of_a_model_in_memory(
    changes: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    recipe = RECIPE.with_changes(**changes)
    record = pruning.prune(job(folder, tmp_path / "out", recipe))
    written = parameters(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    for name, expected in parameters(in_memory(folder, recipe)).items():
        assert torch.equal(written[name], expected), name
    masks = MaskSet.load(tmp_path / "out")
    for name in masks:
        assert not written[name][~masks[name]].any()
    assert record["recipe"]["permute"] == "mlp,heads,residual"
    assert any("retained score rose from" in note for note in record["notes"])
    assert all(layer[AFTER] > 0.5 and BEFORE in layer for layer in record["layers"])


def test_a_packed_folder_is_true_for_the_permuted_weights(folder: Path, tmp_path: Path) -> None:
    recipe = RECIPE.with_changes(values="int4", values_head="int8")
    pruning.prune(job(folder, tmp_path / "out", recipe))
    written = parameters(symprune.load(tmp_path / "out", dequantize=True))
    model = load_model(hub.resolve(str(folder))).float()
    tokenizer = hub.load_tokenizer(hub.resolve(str(folder)))
    blocks = walk.Blocks(find_layout(model), stored=torch.bfloat16)
    report = symprune.prune(model, tokenizer, recipe, blocks=blocks)
    for name, expected in parameters(model.to(torch.bfloat16)).items():
        assert torch.equal(written[name], expected), name
    for matrix in find_layout(model).all_matrices():
        keep = matrix.slice_of(report.masks[matrix.parameter_name])
        assert not matrix.slice_of(written[matrix.parameter_name])[~keep].any()


@pytest.mark.parametrize("states_kept", [True, False])
@pytest.mark.parametrize("changes", [{}, {"values": "int4", "reconstruct": "block"}], ids=str)
def test_a_killed_run_goes_on_to_the_same_bytes(
    changes: dict[str, Any],
    states_kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, recipe = write("smollm", tmp_path / "dense"), RECIPE.with_changes(**changes)
    pruning.prune(job(folder, tmp_path / "whole", recipe))
    monkeypatch.setattr(resume.HiddenStates, "due", lambda _: states_kept)
    for block in (0, 1):
        with monkeypatch.context() as patch:
            die_after(block, patch)
            with pytest.raises(Killed):
                pruning.prune(job(folder, tmp_path / "out", recipe))
    pruning.prune(job(folder, tmp_path / "out", recipe))
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_digits_that_were_not_computed_with_follow_their_weights(tmp_path: Path) -> None:
    """Computed in bfloat16, written in float32: a kept weight is the dense one, to the last bit."""
    families.model("qwen2").save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    pruning.prune(job(tmp_path / "dense", tmp_path / "out", compute_dtype="bfloat16"))
    dense = parameters(families.model("qwen2"))
    for name, weight in parameters(AutoModelForCausalLM.from_pretrained(tmp_path / "out")).items():
        kept = weight[weight != 0]
        assert kept.dtype == torch.float32 and torch.isin(kept, dense[name]).all(), name


def test_perplexity_is_measured_on_what_was_written(tmp_path: Path) -> None:
    folder = write("smollm", tmp_path / "dense")
    measured = {"evaluate": True, "eval_data": __file__, "eval_windows": 2}
    record = pruning.prune(job(folder, tmp_path / "out", **measured))
    again = pruning.prune(job(tmp_path / "out", tmp_path / "again", Recipe(**TEXT), **measured))
    assert again["perplexity"][0]["dense"] == record["perplexity"][0]["pruned"]


def test_masks_of_a_permuted_model_do_not_fit_the_dense_one(tmp_path: Path) -> None:
    folder = write("smollm", tmp_path / "dense")
    pruning.prune(job(folder, tmp_path / "out"))
    made = pruning.recipe_of(tmp_path / "out")
    with pytest.raises(SympruneError, match="Masks made with --permute fit the weights beside"):
        pruning.prune(job(folder, tmp_path / "refined", made, masks=tmp_path / "out"))


def test_cells_of_a_sweep_do_not_see_each_other(tmp_path: Path) -> None:
    grid = Grid(
        methods=["wanda"], patterns=["2:4"], permutes=["all", None, "mlp"], eval_data=__file__,
        eval_windows=1, **TEXT,
    )  # fmt: skip
    together = Sweep(families.model("qwen2"), families.tokenizer(), "m", grid, tmp_path / "all")
    found = together.run()
    assert [cell["recipe"].get("permute") for cell in found] == ["mlp,heads,residual", None, "mlp"]
    model, plain = families.model("qwen2"), replace(grid, permutes=[None])
    given = Sweep(model, families.tokenizer(), "m", plain, tmp_path / "given")
    for cell, each in zip(found, given.run(recipes=grid.recipes()), strict=True):
        assert each["perplexity"] == cell["perplexity"]
    for number, recipe in enumerate(grid.recipes()):
        model = families.model("qwen2")
        alone = Sweep(model, families.tokenizer(), "m", grid, tmp_path / f"{number}")
        assert alone.run(recipes=[recipe])[0]["perplexity"] == found[number]["perplexity"]
