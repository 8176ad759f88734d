"""`inspect` of a mixture of experts: the share of each in what its router gives out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from symprune.cli import main
from symprune.engine.experts.mixtures import find_mixtures
from symprune.engine.text.tokens import draw_tokens
from symprune.eval import experts
from symprune.jobs.experts.load import measure
from symprune.models.hub import Access
from symprune.recipe import Recipe
from symprune.stats import Needs
from tests.support import families
from tests.symprune.engine.test_experts import FAMILIES, lively, logits

TEXT = ("builtin", 2, 16)


def save(family: str, folder: Path) -> Path:
    lively(family).save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    return folder


def inspect(*arguments: str | Path) -> str:
    said = CliRunner().invoke(main.app, ["inspect", *map(str, arguments)], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    return " ".join(said.output.split())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_share_is_the_sum_of_the_routers_weights_of_an_experts_tokens(
    family: str, tmp_path: Path
) -> None:
    found = measure(save(family, tmp_path), Access(), *TEXT)
    assert found is not None and (found["count"], found["top_k"]) == (4, 2)
    model, by_hand = lively(family), {}
    for mixture in find_mixtures(model, 4):
        sums = by_hand.setdefault(mixture.name, torch.zeros(4, dtype=torch.float64))

        def add(_: Any, args: tuple[Any, ...], sums: torch.Tensor = sums) -> None:
            for row, weights in zip(args[1].tolist(), args[2].tolist(), strict=True):
                for number, weight in zip(row, weights, strict=True):
                    sums[number] += weight

        mixture.experts.register_forward_pre_hook(add)
    recipe = Recipe(calibration="builtin", nsamples=2, seqlen=16)
    logits(model, draw_tokens(families.tokenizer(), recipe, Needs(), 16)[0])
    assert [layer["name"] for layer in found["layers"]] == list(by_hand)
    for layer in found["layers"]:
        assert layer["gates"] == pytest.approx(by_hand[layer["name"]].tolist(), rel=1e-4)
        assert sum(layer["tokens"]) == 2 * 2 * 16
    assert f"4 experts in each of {len(by_hand)} layers, 2 to a token" in experts.summary(found)


def test_inspect_tells_it_in_a_sentence_and_with_all_layer_by_layer(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path / "dense")
    short = inspect(folder, "--nsamples", "2", "--json", tmp_path / "found.json")
    assert "the router gives most to expert" in short and "25 % would be even" in short
    assert "Load per expert" not in short and "every layer's experts" in short
    found = json.loads((tmp_path / "found.json").read_text())["experts"]
    (first, _) = found["layers"]
    share = f"{100 * max(first['gates']) / sum(first['gates']):.1f}%"
    assert share in inspect(folder, "--nsamples", "2", "--all")
    assert "would be even" not in inspect(folder, "--no-load")


def test_without_a_tokenizer_the_rest_is_shown_and_a_note(tmp_path: Path) -> None:
    lively("mixtral").save_pretrained(tmp_path)
    said = inspect(tmp_path)
    assert "weights are zero" in said and "What experts have to do was not measured" in said


def test_an_expert_that_no_token_comes_to_is_counted() -> None:
    layers = [{"name": "a", "tokens": [3, 0], "gates": [1.5, 0.0]}]
    load = {"count": 2, "top_k": 1, "text": "t", "windows": 1, "seqlen": 3, "layers": layers}
    assert "1 expert has none" in experts.summary(load)
    assert "least to expert 1 of a, 0.0%" in experts.summary(load)
