"""Every model family: what is pruned, what is left alone, and that the walk is the model's own."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from torch import nn

from symprune.engine import forward
from symprune.engine.walk import prune
from symprune.errors import SympruneError
from symprune.models.layout import find_layout
from symprune.recipe import Recipe


@pytest.fixture(params=families.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_family_is_pruned_where_it_should_and_nowhere_else(
    family: str, device: torch.device
) -> None:
    model = families.model(family).to(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = prune(model, families.tokens(), Recipe(method="symwanda", sparsity=0.5))
    masked = set(report.masks)
    assert masked and len(report.layers) >= 2 * 4
    for name, parameter in model.named_parameters():
        if name in masked:
            keep = report.masks[name]
            assert torch.equal(parameter != 0, keep.to(device) & (before[name] != 0)), name
            assert torch.equal(parameter[keep], before[name][keep]), name
        else:
            assert torch.equal(parameter, before[name]), name
            assert "norm" in name or "embed" in name or parameter.dim() != 2 or _outside(name), name
    for matrix in find_layout(model).all_matrices():
        zeros = (matrix.weight == 0).sum(1)
        assert (zeros == matrix.weight.shape[1] // 2).all(), matrix.name
    assert report.sparsity == 0.5


def _outside(name: str) -> bool:
    """Matrices that must stay dense: embeddings, the head, a router."""
    return any(part in name for part in ("wte", "wpe", "lm_head", "embed", "gate.weight"))


def test_the_walk_computes_what_the_model_computes(family: str) -> None:
    model, tokens = families.model(family), families.tokens()
    layout = find_layout(model)
    outputs: list[torch.Tensor] = []

    def remember(_: nn.Module, __: Any, out: Any) -> None:
        outputs.append(out[0] if isinstance(out, tuple) else out)

    handle = layout.blocks[-1].register_forward_hook(remember)
    with torch.no_grad():
        for row in tokens:
            model(input_ids=row[None], use_cache=False)
    handle.remove()
    with forward.ready(model):
        activations = forward.embed(layout, tokens)
        for index, block in enumerate(layout.blocks):
            activations.advance(index, block)
    torch.testing.assert_close(activations.hidden, torch.cat(outputs), rtol=1e-4, atol=1e-5)


def test_tied_weights_stay_tied() -> None:
    model = families.model("smollm")
    prune(model, families.tokens(), Recipe())
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_experts_are_measured_on_the_tokens_routed_to_them() -> None:
    model, tokens = families.model("mixtral"), families.tokens(6, 16)
    report = prune(model, tokens, Recipe(method="wanda"))
    for block in (0, 1):
        seen = [
            layer.tokens
            for layer in report.layers
            if layer.name.startswith(f"model.layers.{block}.") and "gate_up_proj" in layer.name
        ]
        assert sum(seen) == tokens.numel() * model.config.num_experts_per_tok
        assert len(set(seen)) > 1


def test_a_model_without_blocks_is_named_with_what_was_looked_for() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(4, 4)

    with pytest.raises(SympruneError, match=r"Flat.*nn\.ModuleList"):
        find_layout(Flat())


def test_a_quantised_model_is_refused() -> None:
    model = families.model()
    layer = find_layout(model).blocks[0].mlp.down_proj
    layer.weight = nn.Parameter(torch.zeros(32, 48, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(SympruneError, match=r"down_proj.*quantised"):
        find_layout(model)


def test_training_mode_and_expert_kernels_are_put_back() -> None:
    model = families.model("mixtral").train()
    before = model.config._experts_implementation
    prune(model, families.tokens(), Recipe())
    assert model.training and model.config._experts_implementation == before
