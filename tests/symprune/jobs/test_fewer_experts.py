"""`prune --experts` from a folder to a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from symprune.cli import console, main
from symprune.engine import walk
from symprune.engine.experts.drop import drop_experts
from symprune.engine.text.tokens import draw_tokens
from symprune.errors import SympruneError
from symprune.eval.experts import by_expert
from symprune.experts import Drop
from symprune.jobs.pruning import Job
from symprune.jobs.pruning import prune as run_job
from symprune.recipe import Recipe
from symprune.stats import Needs
from tests.support import families
from tests.symprune.engine.test_experts import FAMILIES, lively, logits

ALONE = Recipe(sparsity=0, experts="drop:25%", calibration="builtin", nsamples=2, seqlen=16)


def save_dense(family: str, folder: Path) -> Path:
    lively(family).save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    return folder


def prune(dense: Path, output: Path, recipe: Recipe = ALONE, **settings: Any) -> dict[str, Any]:
    return run_job(Job(str(dense), recipe, output, eval_windows=2, **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_is_a_plain_checkpoint_of_the_dense_models_other_experts(
    family: str, tmp_path: Path
) -> None:
    dense = save_dense(family, tmp_path / "dense")
    measured = family == "mixtral"
    record = prune(dense, tmp_path / "out", evaluate=measured)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    before = json.loads((dense / "config.json").read_text())
    changed = {name for name in before if config[name] != before[name]}
    assert changed and all("experts" in name and config[name] == 3 for name in changed)
    fewer, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    for layer in record["experts"]["layers"]:
        assert sum(layer["tokens"]) == 2 * 2 * 16
        kept = [number for number in range(4) if number not in layer["dropped"]]
        whole = lively(family).get_submodule(layer["name"]).experts.state_dict()
        for name, left in fewer.get_submodule(layer["name"]).experts.state_dict().items():
            assert torch.equal(left, whole[name][kept])
    for figures in record["perplexity"]:
        assert figures["dense"] != figures["pruned"] and figures["divergence"]["kl"] > 0
    assert len(record["perplexity"]) == measured
    assert record["removed"] == 0 and record["pruned_bytes"] < record["dense_bytes"]
    gone = sum(p.numel() for p in lively(family).parameters()) - fewer.num_parameters()
    assert record["experts"]["weights"] == gone > 0


def test_a_model_on_disk_and_one_in_memory_lose_the_same_experts_and_weights(
    tmp_path: Path,
) -> None:
    dense = save_dense("qwen3-moe", tmp_path / "dense")
    recipe = ALONE.with_changes(method="magnitude", sparsity=0.5)
    record = prune(dense, tmp_path / "out", recipe, evaluate=False)
    alone = prune(dense, tmp_path / "alone", evaluate=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
    walk.prune(model, families.tokens(), Recipe("magnitude", sparsity=0.5))
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = families.tokens()
    assert torch.equal(logits(pruned, tokens), logits(model, tokens))
    assert record["experts"] == alone["experts"] and record["sparsity"] == pytest.approx(0.5)


def test_the_scores_of_a_model_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    dense = save_dense("mixtral", tmp_path / "dense")
    record = prune(dense, tmp_path / "out", evaluate=False)
    tokens, _ = draw_tokens(families.tokenizer(), ALONE, Needs(), 16)
    found, _ = drop_experts(lively("mixtral"), tokens, Drop(0.25))
    for ours, theirs in zip(record["experts"]["layers"], found["layers"], strict=True):
        assert ours["name"] == theirs["name"] and ours["tokens"] == theirs["tokens"]
        assert ours["scores"] == pytest.approx(theirs["scores"], rel=1e-5)


def test_a_user_sees_what_went_and_what_each_expert_had_to_do(tmp_path: Path) -> None:
    dense = save_dense("mixtral", tmp_path / "dense")
    arguments = ["prune", "--model", dense, "--experts", "drop:25%", "--sparsity", "0"]
    arguments += ["--calibration", "builtin", "--nsamples", "2", "--seqlen", "16", "--no-samples"]
    arguments += ["--eval-windows", "2", "--output", tmp_path / "out"]
    said = CliRunner().invoke(main.app, [str(a) for a in arguments], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    flat = " ".join(said.output.split())
    assert "1 of 4 experts of every layer gone, perplexity" in flat
    assert "experts drop:25%, all other weights kept" in flat
    shown = CliRunner().invoke(main.app, ["inspect", str(tmp_path / "out"), "--all"]).output
    assert "Load per expert, before experts were dropped" in shown
    assert "3 experts in each of 2 layers" in shown and "model.layers.1.mlp" in shown


def test_a_model_without_experts_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    dense = save_dense_llama(tmp_path / "dense")
    with pytest.raises(SympruneError, match="the structure of llama is not one of them"):
        prune(dense, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def save_dense_llama(folder: Path) -> Path:
    families.model("llama").save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "found",
    [
        None, 3, {}, {"layers": 1}, {"layers": [[]]}, {"layers": [{"name": 1}]},
        {"layers": [{"name": "a", "tokens": ["x"], "dropped": []}]},
        {"layers": [{"name": "a", "tokens": [], "dropped": []}]},
        {"layers": [{"name": "a", "tokens": [1], "dropped": None}]},
    ],
)  # fmt: skip
def test_a_record_that_says_nothing_of_experts_shows_nothing(found: Any) -> None:
    assert by_expert(found) is None


def test_of_hundreds_of_experts_the_first_are_named() -> None:
    layer = {"name": "[red]x", "tokens": list(range(100)), "dropped": [1]}
    table = by_expert({"layers": [layer]})
    assert table is not None
    with console.out.capture() as shown:
        console.out.print(table)
    assert "[red]x" in shown.get() and "and 92 more" in " ".join(shown.get().split())
