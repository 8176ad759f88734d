"""Whole models, packed in memory: they say what the dense models with the same weights say."""

from __future__ import annotations

import copy
from typing import Any

import families
import packed_models
import pretend_device
import pytest
import torch
from torch import Tensor

from symprune import Recipe, prune
from symprune.errors import SympruneError
from symprune.runtime.blob import decode
from symprune.runtime.layers import packed_parameters
from symprune.runtime.pack_model import pack_model
from symprune.runtime.packable import packable
from symprune.runtime.unpack_model import unpack_model

EVERY = (*families.FAMILIES, *families.UNUSUAL)
MAIN = ("llama", "gpt2", "mixtral", "qwen2", "gemma3")


def dense(model: Any) -> Any:
    """The same model with plain, dequantised weights."""
    plain = copy.deepcopy(model)
    unpack_model(plain)
    return plain


@torch.no_grad()
def logits(model: Any, tokens: Tensor | None = None) -> Tensor:
    given = families.tokens(2, 12) if tokens is None else tokens
    return model(given, use_cache=False).logits.float()


@pytest.mark.parametrize("family", EVERY)
def test_a_model_of_any_family_runs_packed(family: str) -> None:
    model = packed_models.packed(family, "bfloat16", around=True)
    expected = packed_models.pruned(family)
    for name in packable(expected):
        weight = expected.get_parameter(name)
        weight.data = weight.data.bfloat16().float()
    assert packed_parameters(model).keys() >= packable(expected).keys()
    # The sums are of a few hundred numbers, in float32, one layer after the other.
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4", "int3z", "int2"])
@pytest.mark.parametrize("family", MAIN)
def test_quantised_values_give_what_the_dequantised_model_gives(family: str, kind: str) -> None:
    model = packed_models.packed(family, kind, around=True)
    found, expected = logits(model), logits(dense(model))
    # A kernel may round what goes into a product to 8 bits, and another expert may be chosen then.
    apart = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert apart.median() < 0.05


@pytest.mark.parametrize("family", MAIN)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_generated_text_is_that_of_the_dense_model(family: str, kind: str) -> None:
    model = packed_models.packed(family, kind)
    prompt = families.tokens(2, 6)
    prompt[0, :3] = 0
    asked = {
        "attention_mask": (prompt != 0).long(),
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    plain = dense(model)
    assert torch.equal(model.generate(prompt, **asked), plain.generate(prompt, **asked))
    several = {**asked, "num_beams": 3}
    assert torch.equal(model.generate(prompt, **several), plain.generate(prompt, **several))


@pytest.mark.parametrize("family", ["smollm", "gemma3", "gpt2"])
def test_a_head_that_is_the_embedding_stays_it(family: str) -> None:
    model = packed_models.packed(family, "int4", around=True)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert table.packed is head.packed
    model.tie_weights()
    model = model.to(torch.bfloat16)
    assert model.get_input_embeddings().packed is model.get_output_embeddings().packed
    plain = dense(model)
    assert plain.get_input_embeddings().weight is plain.get_output_embeddings().weight


def test_without_being_asked_embedding_and_head_stay_dense() -> None:
    model = packed_models.packed("llama")
    assert model.lm_head.weight.dim() == 2
    assert set(packed_parameters(model)) == {
        name for name in packable(families.model()) if "layers" in name
    }


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_a_packed_model_runs_on_an_accelerator(family: str) -> None:
    model = packed_models.packed(family, "int4", around=True)
    expected = logits(dense(model))
    with pretend_device.PretendDevice() as device:
        there = device.take(model)
        given = families.tokens(2, 12).to(pretend_device.DEVICE)
        found = logits(there, given).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_adapters_learn_on_top_of_packed_weights() -> None:
    model = packed_models.packed("llama", "int4").requires_grad_(False)
    packed, plain = model, dense(model)
    torch.manual_seed(0)
    down, up = torch.randn(4, 32) / 8, torch.zeros(32, 4)
    gradients = []
    for each in (packed, plain):
        factor = up.clone().requires_grad_()
        layer = each.model.layers[0].self_attn.q_proj
        layer.register_forward_hook(
            lambda _, x, y, factor=factor: y + x[0] @ down.T @ factor.T  # type: ignore[misc]
        )
        tokens = families.tokens(2, 8)
        each(tokens, labels=tokens).loss.backward()
        gradients.append(factor.grad)
    assert gradients[0].norm() > 0
    # As above: a kernel may round what goes into a product to 8 bits.
    assert (gradients[0] - gradients[1]).norm() < 0.1 * gradients[1].norm()


@pytest.mark.parametrize("family", ["smollm", "mixtral"])
def test_a_compiled_model_stops_at_packed_layers_and_goes_on(family: str) -> None:
    model = packed_models.packed(family, "int4", around=True)
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    assert torch.equal(logits(compiled), logits(model))


@pytest.mark.parametrize("family", MAIN)
def test_weights_at_the_level_zero_need_no_mask(family: str) -> None:
    model = families.model(family)
    report = prune(model, families.tokens(2, 12), Recipe(sparsity=0, values="int2"))
    expected = copy.deepcopy(model)
    pack_model(model, report.values)
    for name, (module, leaf) in packed_parameters(model).items():
        blob, layout = module.blob(leaf)
        assert layout.kind == "int2z" and not layout.masked
        weight = expected.get_parameter(name)
        assert (weight == 0).any() and torch.equal(decode(blob, torch.float32), weight)


def test_values_that_do_not_make_a_parameter_get_a_sentence() -> None:
    model = packed_models.pruned("mixtral")
    packing = next(each for each in packable(model).values() if each.stacked)
    weights = packing.pieces(model.get_parameter(packing.name).data)
    names = packing.matrices
    some = {names[0]: packed_models.rounded(weights[0], "int8")}
    with pytest.raises(SympruneError, match=r"Only some of the matrices of .* are on a grid"):
        pack_model(copy.deepcopy(model), some)
    kinds = ["int8", "int4", "int4", "int4"]
    mixed = {
        name: packed_models.rounded(weight, kind)
        for name, weight, kind in zip(names, weights, kinds, strict=True)
    }
    with pytest.raises(SympruneError, match="would have values of int"):
        pack_model(copy.deepcopy(model), mixed)
