"""LoRA on a pruned model: zeros stay, what is trained is what is merged, the base never travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from symprune import MaskSet
from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.problems.models.lora import add_lora, merge_lora
from symprune.fed.problems.problem import Problem
from symprune.fed.simulate import simulate

pytest.importorskip("peft")
VOCABULARY, LENGTH = 40, 8


def tokens(seed: int, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)


def pruned() -> tuple[Any, MaskSet]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model, masks = LlamaForCausalLM(config), MaskSet()
    for name, weight in model.named_parameters():
        if "_proj" in name:
            masks[name] = torch.rand(weight.shape) < 0.5
    masks.apply(model)
    return model, masks


def trained(algorithm: str = "fedavg", **options: Any) -> tuple[Any, MaskSet, Problem, Any]:
    model, masks = pruned()
    adapted = add_lora(model, masks, rank=2, targets=("q_proj", "down_proj"))
    problem = Problem.causal_lm(adapted, [tokens(0), tokens(1)], length=LENGTH, test=tokens(2))
    return adapted, masks, problem, simulate(build(algorithm, **options), problem, 3)


def test_the_merged_model_keeps_its_zeros_and_is_the_one_that_was_trained() -> None:
    adapted, masks, _, result = trained(gamma=1.0, p=0.5, batch=2)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    merged = merge_lora(adapted, result.parameters)
    weights = dict(merged.named_parameters())
    for name, keep in masks.items():
        assert not weights[name][~keep].any()
    dense = Problem.causal_lm(merged, [tokens(0), tokens(1)], length=LENGTH, test=tokens(2))
    assert dense.evaluate(dense.initial())["perplexity"] == pytest.approx(
        result.history[-1]["perplexity"], rel=1e-5
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    original = dict(pruned()[0].named_parameters())[name]
    assert bool((weights[name] != original)[masks[name]].any())


def test_only_adapters_are_trained_and_sent() -> None:
    _, _, problem, result = trained(gamma=0.5, p=0.5)
    assert all("lora_" in name for name in problem.layout.names)
    assert problem.dimension == 2 * 2 * ((16 + 16) + (24 + 16))
    values = 3 * 2 * 4 * problem.dimension
    assert values < result.history[-1]["bytes_up"] < values + 3 * 2 * 20


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {"compressor": "int8", "gamma": 0.5, "p": 0.5}),
        ("ef21", {"compressor": "top-k:0.1+int8", "gamma": 0.2}),
    ],
)
def test_adapters_are_sent_compressed(name: str, options: dict[str, Any]) -> None:
    _, _, problem, result = trained(name, **options)
    dense = 3 * 2 * 4 * problem.dimension
    assert result.history[-1]["bytes_up"] < dense / 3
    assert result.history[-1]["loss"] < result.history[0]["loss"]


def test_clients_alone_over_the_wire_and_resumed_are_the_same_bits(tmp_path: Path) -> None:
    options = {"gamma": 0.5, "p": 0.5, "batch": 2}
    _, _, _, together = trained(**options)
    _, _, again, _ = trained(**options)
    runs = {"clients_at_once": 1, "wire": True, "checkpoint": tmp_path / "run.safetensors"}
    simulate(build("fedavg", **options), again, 1, **runs)
    alone = simulate(build("fedavg", **options), again, 3, **runs)
    assert torch.equal(alone.model, together.model) and alone.history == together.history


def test_what_does_not_fit_is_named() -> None:
    model, masks = pruned()
    with pytest.raises(SympruneError, match="rank = 0"):
        add_lora(model, masks, rank=0)
    with pytest.raises(SympruneError, match="no parameter head for the mask"):
        add_lora(model, {"head": torch.ones(1) > 0})
    with pytest.raises(SympruneError, match="LoRA does not fit the model"):
        add_lora(model, masks, targets=("nothing",))
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.fill_(1)
    with pytest.raises(SympruneError, match=r"q_proj has weights that its mask prunes"):
        add_lora(model, masks)
    adapted = add_lora(pruned()[0], rank=1, targets=("q_proj",))
    with pytest.raises(SympruneError, match="no adapter x"):
        merge_lora(adapted, {"x": torch.zeros(1)})
