"""The pictures of one layer: what is measured is what goes through it, and the page has its run."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import families
import pytest
import torch

from symprune.errors import SympruneError

ROOT = Path(__file__).parents[1]
MATRIX = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "picture_layer.py"
    spec = importlib.util.spec_from_file_location("picture_layer", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def test_errors_are_those_of_the_outputs_on_tokens_that_did_not_decide(script: Any) -> None:
    model = families.model("smollm")
    tokens = torch.randint(3, 64, (6, 24), generator=torch.Generator().manual_seed(1))
    seen = script.measure(model, MATRIX, tokens[:4], tokens[4:])
    made = script.prune_with_each(seen, 0.5)

    given: list[torch.Tensor] = []
    hook = model.get_submodule(MATRIX).register_forward_pre_hook(
        lambda _, inputs: given.append(inputs[0].detach())
    )
    with torch.no_grad():
        for window in tokens[4:]:
            model(window[None])
    hook.remove()
    x = torch.cat([each[0] for each in given]).double()
    weight = seen.weight.double()
    for label, decision in made.items():
        lost = x @ (script.values_of(seen, decision).double() - weight).T
        expected = float(lost.norm() / (x @ weight.T).norm())
        assert decision.figures["held_out_error"] == pytest.approx(expected, rel=1e-3), label
        assert (decision.keep.sum(1) == weight.shape[1] // 2).all(), label


def test_a_matrix_that_is_not_there_is_named(script: Any) -> None:
    tokens = torch.full((1, 8), 5)
    with pytest.raises(SympruneError, match=r"no matrix called 'model\.nowhere'"):
        script.measure(families.model("smollm"), "model.nowhere", tokens, tokens)


def test_four_pictures_are_drawn_and_the_table_has_every_method(
    script: Any, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(str(tiny_folder), MATRIX, 0.5, "builtin", 4, 32, 0, tmp_path)
    shown = capsys.readouterr().out
    assert f"{MATRIX}: 128 tokens, 32 held out" in shown
    names = sorted(path.name for path in tmp_path.glob("*.png"))
    page = (ROOT / "docs" / "learn" / "explained.md").read_text(encoding="utf-8")
    assert names == sorted(re.findall(r"images/(layer-\w+\.png)", page)) and len(names) == 4
    assert all(f"\n| {label} |" in page for label in script.METHODS)
