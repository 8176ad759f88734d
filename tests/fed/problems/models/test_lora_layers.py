"""LoRA on every kind of layer that is pruned: neither adding nor merging it changes anything."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from torch import Tensor

from symprune import MaskSet
from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.problems.models.lora import add_lora, merge_lora
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import simulate
from symprune.models.layout import find_layout

pytest.importorskip("peft")
# Linear layers; GPT-2's, stored transposed, square ones among them; one product for every group.
KINDS = ("llama", "gpt2", "deepseek-v4")


def pruned(family: str) -> tuple[Any, MaskSet]:
    """A model with half of its matrices' weights gone at random, and the masks that say which."""
    model, masks = families.model(family), MaskSet()
    generator = torch.Generator().manual_seed(1)
    for matrix in find_layout(model).all_matrices():
        shape = matrix.parameter.shape
        masks[matrix.parameter_name] = torch.rand(shape, generator=generator) < 0.5
    masks.apply(model)
    return model, masks


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(input_ids=families.tokens(2, 12), use_cache=False).logits
    return out


def change_adapters(adapted: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2, generator=generator)


@pytest.mark.parametrize("with_masks", [True, False])
@pytest.mark.parametrize("family", KINDS)
def test_adapters_change_nothing_at_first_and_merging_changes_nothing_after(
    family: str, with_masks: bool
) -> None:
    model, masks = pruned(family)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    before = logits(model)
    adapted = add_lora(model, masks if with_masks else None, rank=2)
    assert torch.equal(logits(adapted), before)
    change_adapters(adapted)
    after = logits(adapted)
    moved = float((after - before).abs().max())
    merged = merge_lora(adapted)
    assert float((logits(merged) - after).abs().max()) < 1e-4 * moved
    found = dict(merged.named_parameters())
    assert found.keys() == weights.keys()
    changed = [name for name in masks if not torch.equal(found[name], weights[name])]
    assert {name for name in masks if "experts." not in name} <= {*changed}
    for name in changed if with_masks else ():
        assert not found[name][~masks[name]].any()


def test_a_base_of_sixteen_bits_is_used_as_it_is_merged() -> None:
    model, masks = pruned("llama")
    adapted = add_lora(model.bfloat16(), masks, rank=2)
    change_adapters(adapted)
    after = logits(adapted)
    merged = merge_lora(adapted)
    assert torch.equal(logits(merged), after)
    assert {weight.dtype for weight in merged.parameters()} == {torch.bfloat16}


def test_gpt2_is_fine_tuned_by_partners_and_the_merged_model_is_theirs() -> None:
    model, masks = pruned("gpt2")
    texts = [families.tokens(3, 8, seed) for seed in (1, 2)]
    adapted = add_lora(model, masks, rank=2)
    problem = Problem.causal_lm(adapted, texts, length=8, test=texts[0])
    result = simulate(build("fedavg", gamma=1.0, p=0.5, batch=2), problem, 3)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    merged = Problem.causal_lm(merge_lora(adapted, result.parameters), texts, length=8)
    found = dict(merged.loss.module.named_parameters())  # type: ignore[attr-defined]
    assert not any(found[name][~keep].any() for name, keep in masks.items())
    loss = merged.mean_value(merged.initial())
    assert loss == pytest.approx(result.history[-1]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("family", "targets", "sentence"),
    [
        ("qwen3-moe", "all-linear", r"experts is no linear layer but a Qwen3MoeExperts: name"),
        ("llama", ("embed_tokens",), "embed_tokens is no linear layer but a Embedding"),
        ("smollm", ("lm_head",), "lm_head shares its matrix with another layer"),
        ("jamba", ("dt_proj",), "dt_proj is part of a Mamba mixer"),
    ],
)
def test_a_layer_that_cannot_have_an_adapter_is_named_and_the_model_stays(
    family: str, targets: Any, sentence: str
) -> None:
    model = families.model(family)
    before = logits(model)
    with pytest.raises(SympruneError, match=sentence):
        add_lora(model, rank=2, targets=targets)
    assert not any("lora_" in name for name, _ in model.named_parameters())
    assert torch.equal(logits(model), before)
