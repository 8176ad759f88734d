"""Blocks trained part by part: where their middle is, and that training it holds what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch

import symprune
from symprune import Recipe
from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.engine import forward
from symprune.engine.middle import find_middle
from symprune.engine.reconstruct import AFTER, BEFORE
from symprune.jobs import pruning
from symprune.models.layout import find_layout

HELD_OUT = families.tokens(4, seed=9)
MIDDLES = {
    "llama": "post_attention_layernorm",
    "gpt2": "ln_2",
    "gemma3": "pre_feedforward_layernorm",
    "mixtral": "post_attention_layernorm",
    "bloom": "post_attention_layernorm",
}
PARTS = Recipe(method="wanda", reconstruct={"name": "part", "epochs": 2, "rate": 0.01})


def middle_of(model: Any) -> Any:
    layout = find_layout(model)
    with forward.ready(model):
        states = forward.embed(layout, families.tokens(2))
        matrices = layout.matrices(0)
        return find_middle(states, 0, layout.blocks[0], matrices, f"{layout.prefix}.0.")


def prune(model: Any, recipe: Recipe = PARTS) -> Any:
    return symprune.prune(model, families.tokens(10), recipe, held_out=HELD_OUT)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", MIDDLES)
def test_the_middle_is_what_the_norm_of_the_mlp_is_given(family: str) -> None:
    model = families.model(family)
    middle = middle_of(model)
    block = find_layout(model).blocks[0]
    assert middle.child is block.get_submodule(MIDDLES[family])
    held = [name for name, _ in block.named_parameters() if middle.holds(name)]
    assert held and all("attn" in name or "attention" in name for name in held)


@pytest.mark.parametrize("family", ["falcon", "gpt-neox", "mamba"])
def test_parts_side_by_side_or_one_alone_have_no_middle_and_are_trained_as_a_block(
    family: str,
) -> None:
    assert middle_of(families.model(family)) is None
    parts, whole = families.model(family), families.model(family)
    prune(parts)
    prune(whole, PARTS.with_changes(reconstruct={**(PARTS.reconstruct or {}), "name": "block"}))
    found = weights_of(whole)
    assert all(torch.equal(each, found[name]) for name, each in weights_of(parts).items())


def test_attention_alone_is_trained_on_the_states_behind_it() -> None:
    """One block whose MLP adds nothing: what comes out of it is what stands in its middle."""
    errors = []
    for recipe in (Recipe(method="wanda"), PARTS):
        model, dense = families.model(), families.model()
        for each in (model, dense):
            each.model.layers = each.model.layers[:1]
            each.model.norm = torch.nn.Identity()
            each.model.layers[0].mlp.down_proj.weight.data.zero_()
        prune(model, recipe)
        with torch.no_grad():
            hidden = [each.model(HELD_OUT).last_hidden_state for each in (model, dense)]
        errors.append(float((hidden[0] - hidden[1]).norm()))
    assert errors[1] < errors[0]


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral"])
def test_errors_fall_and_zeros_stay_in_both_parts(family: str) -> None:
    model, untrained = families.model(family), families.model(family)
    report = prune(model)
    prune(untrained, PARTS.with_changes(reconstruct=None))
    after, before = weights_of(model), weights_of(untrained)
    changed = {name for name, keep in report.masks.items() if not after[name].equal(before[name])}
    assert any("attn" in name for name in changed)
    assert any("mlp" in name or "expert" in name or "block_sparse" in name for name in changed)
    assert all(not after[name][~keep].any() for name, keep in report.masks.items())
    figures = [layer.figures for layer in report.layers]
    assert any(each[AFTER] < each[BEFORE] for each in figures)


def test_a_killed_run_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.model().save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    recipe = PARTS.with_changes(calibration=__file__, nsamples=4, seqlen=16, values="int4")

    def job(output: str) -> pruning.Job:
        return pruning.Job(str(tmp_path / "dense"), recipe, tmp_path / output, evaluate=False)

    pruning.prune(job("whole"))
    finish = StreamedBlocks.finish

    def then_die(self: StreamedBlocks, index: int, *rest: Any) -> None:
        finish(self, index, *rest)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StreamedBlocks, "finish", then_die)
        with pytest.raises(KeyboardInterrupt):
            pruning.prune(job("out"))
    pruning.prune(job("out"))
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole
