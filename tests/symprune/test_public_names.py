"""What `import symprune` offers: names, short words for what was made, and sentences for what does
not fit."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import families
import pytest
import torch

import symprune
from symprune.errors import SympruneError


def test_a_bare_import_reaches_every_module_it_lists() -> None:
    program = (
        "import sys, symprune; assert 'torch' not in sys.modules\n"
        "for name in dir(symprune): getattr(symprune, name)\n"
        "print(symprune.scores.magnitude, *dir(symprune))"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {"prune", "Recipe", "scores", "masks", "stats", "fed", "eval"} <= set(said.split())


def test_a_report_and_its_masks_are_shown_in_a_line() -> None:
    report = symprune.prune(families.model(), families.tokens(), symprune.Recipe("wanda"))
    shown = f"Report(wanda, 50 % per row: {report.removed:,} of {report.prunable:,} weights removed"
    assert repr(report) == f"{shown}, {len(report.layers)} matrices)"
    assert (
        repr(report.masks) == f"MaskSet({len(report.masks)} masks of {report.prunable:,} weights)"
    )


@pytest.mark.parametrize(
    ("function", "positional"),
    [
        (symprune.prune, 3),
        (symprune.load, 1),
        (symprune.Recipe, 2),
        (symprune.masks.keep_mask, 2),
        (symprune.stats.ChannelStats, 2),
    ],
)
def test_options_go_by_keyword_and_are_explained(
    function: Callable[..., Any], positional: int
) -> None:
    parameters = inspect.signature(function).parameters.values()
    by_place = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    assert len(by_place) == positional
    explained = inspect.getdoc(function) or ""
    for each in parameters:
        assert f"\n    {each.name}: " in explained, each.name


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("text", "tokenizer or a .* tensor of token ids, not a str"),
        ([[1, 2]], "not a list"),
        (None, "not nothing"),
        (torch.zeros(2, 8), "whole numbers, not torch.float32"),
        (torch.ones(2, 8, dtype=torch.bool), "not torch.bool"),
        (torch.full((2, 8), 10**6), "token 1000000 is not in the model's vocabulary"),
        (torch.full((2, 8), -1), "token -1 is not"),
        (torch.ones(8, dtype=torch.long), "filled"),
    ],
)
def test_data_that_is_not_tokens_gets_a_sentence(data: Any, said: str) -> None:
    with pytest.raises(SympruneError, match=said):
        symprune.prune(families.model(), data, symprune.Recipe("wanda"))


def test_a_model_or_recipe_of_another_kind_gets_a_sentence() -> None:
    with pytest.raises(SympruneError, match="not a str"):
        symprune.prune("llama2-7b", families.tokens())
    with pytest.raises(SympruneError, match="The recipe is a dict"):
        symprune.prune(families.model(), families.tokens(), {"method": "wanda"})
