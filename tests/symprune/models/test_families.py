"""Unusual families: pruned as hooks on their own layers say, or refused in a sentence."""

from __future__ import annotations

import copy
from typing import Any

import families
import hooked
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from symprune.engine.report import Report
from symprune.engine.walk import prune
from symprune.errors import SympruneError
from symprune.models.layout import find_layout
from symprune.recipe import Recipe

WANDA = Recipe(method="wanda")


@pytest.fixture(params=[*families.UNUSUAL, "llama", "gpt2", "mixtral"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_masks_are_those_of_hooks_on_the_familys_own_layers(family: str) -> None:
    """But for a bit or two where rounding decides; a wrong statistic changes many."""
    model, tokens = families.model(family), families.tokens()
    reference = copy.deepcopy(model)
    report = prune(model, tokens, WANDA)
    expected = hooked.masks(reference, tokens, otherwise=report.masks)
    assert len(expected) > 0.8 * len(report.layers)
    differing = size = 0
    for matrix in find_layout(model).all_matrices():
        if matrix.name in expected:
            found = matrix.slice_of(report.masks[matrix.parameter_name])
            differing += int((found != expected[matrix.name]).sum())
            size += found.numel()
    assert differing <= 0.001 * size


def test_an_expert_is_measured_on_the_tokens_that_come_to_it() -> None:
    """llama4 hands every expert all tokens, with zeros in the place of those for others."""
    tokens = families.tokens()
    layers = prune(families.model("llama4"), tokens, WANDA).layers
    experts = [layer for layer in layers if ".experts." in layer.name and "gate_up" in layer.name]
    blocks = {layer.name.split("experts")[0] for layer in experts}
    asked = families.model("llama4").config.num_experts_per_tok
    assert experts and sum(one.tokens for one in experts) == asked * tokens.numel() * len(blocks)


def test_the_order_of_the_samples_does_not_show(family: str) -> None:
    """Bits agree because sums over samples are exact and samples pass a block one by one."""
    tokens = families.tokens()
    first = prune(families.model(family), tokens, WANDA).masks
    second = prune(families.model(family), tokens.flip(0), WANDA).masks
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_convolutions_routers_and_gates_stay_as_they_are(family: str) -> None:
    model = families.model(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masks = prune(model, families.tokens(), WANDA).masks
    for path, module in model.named_modules():
        called = path.rpartition(".")[2] in ("router", "gate", "shared_expert_gate", "rg_lru")
        if called or isinstance(module, nn.modules.conv._ConvNd):
            assert not [name for name in masks if name.startswith(f"{path}.")], path
    for name, value in model.state_dict().items():
        assert name in masks or torch.equal(value, before[name]), name


def test_magnitude_leaves_routers_and_convolutions_alone_as_well() -> None:
    for family in ("hunyuan-moe", "jetmoe", "longcat", "dbrx", "mamba", "jamba"):
        model = families.model(family)
        masks = prune(model, families.tokens(), Recipe(method="magnitude")).masks
        assert not [name for name in masks if any(w in name for w in ("conv1d", "router", "gate."))]


def test_patterns_run_along_the_inputs_of_experts_however_they_are_stored() -> None:
    for family in ("llama4", "dbrx", "gpt-oss", "jetmoe", "deepseek-v4"):
        model = families.model(family)
        report = prune(model, families.tokens(8, 32), Recipe(method="magnitude", pattern="2:4"))
        for matrix in find_layout(model).all_matrices():
            keep = matrix.slice_of(report.masks[matrix.parameter_name])
            groups = keep.reshape(len(keep), -1, 4).sum(2)
            assert (groups == 2).all(), matrix.name


def test_experts_that_compute_nothing_have_weights_that_stay_dense() -> None:
    """LongCat's parameter has room for its identity experts too, whose weights nobody reads."""
    report = prune(families.model("longcat"), families.tokens(), WANDA)
    unused = [layer for layer in report.layers if "gate_up_proj" in layer.name and layer.dense]
    assert {layer.name.rpartition(".")[2] for layer in unused} >= {"4", "5"}
    assert any("no calibration token" in note and "gate_up_proj" in note for note in report.notes)


def test_a_matrix_no_token_reaches_stays_dense_unless_magnitude_was_asked_for() -> None:
    def silenced() -> Any:
        model = families.model("mixtral")
        with torch.no_grad():
            for block in find_layout(model).blocks:
                block.mlp.gate.weight.zero_()  # the top two are always the same
        return model

    report = prune(silenced(), families.tokens(), WANDA)
    silent = [layer for layer in report.layers if layer.dense]
    assert silent and all(layer.removed == 0 and "experts" in layer.name for layer in silent)
    assert report.sparsity < 0.5
    [note] = [note for note in report.notes if "no calibration token" in note]
    assert "4 x experts.down_proj, 4 x experts.gate_up_proj" in note
    assert prune(silenced(), families.tokens(), Recipe(method="magnitude")).sparsity == 0.5


class _Choosing(nn.Module):
    """A mixture whose router has a name, and a size, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatch = nn.Linear(32, 5)
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.softmax(self.dispatch(x), -1).topk(1).values
        return self.down(torch.relu(self.up(x))) * scores


def test_what_picks_experts_stays_dense_whatever_it_is_called() -> None:
    model = families.model()
    for block in find_layout(model).blocks:
        block.mlp = _Choosing()
    report = prune(model, families.tokens(), WANDA)
    dense = [layer for layer in report.layers if layer.dense]
    assert [layer.kind for layer in dense] == ["mlp.dispatch"] * 2
    assert any("picks experts" in note and "2 x mlp.dispatch" in note for note in report.notes)
    assert all((block.mlp.dispatch.weight != 0).all() for block in find_layout(model).blocks)


def test_weights_that_several_blocks_share_stay_dense_and_are_listed() -> None:
    model = families.model("zamba2")
    report = prune(model, families.tokens(), WANDA)
    assert not any("shared_transformer" in name for name in report.masks)
    assert any("shared by several blocks" in note and "q_proj" in note for note in report.notes)


def test_products_with_parameters_of_no_known_layer_are_listed() -> None:
    notes = prune(families.model("recurrent-gemma"), families.tokens(), WANDA).notes
    assert any("rg_lru.input_gate_weight" in note for note in notes)


def test_a_model_that_loops_over_its_blocks_is_refused() -> None:
    small = {**families.SMALL, "head_dim": 8}
    made = hf.HrmTextConfig(**small, num_layers_per_stack=2, H_cycles=2, L_cycles=2)
    model = hf.AutoModelForCausalLM.from_config(made).eval()
    with pytest.raises(SympruneError, match="more than once"):
        prune(model, families.tokens(), WANDA)


@pytest.mark.parametrize("family", families.LOOKING)
def test_of_a_model_that_sees_the_language_model_inside_is_pruned(family: str) -> None:
    model = families.looking(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = prune(model, families.tokens(), WANDA)
    assert report.sparsity == 0.5
    assert all("language_model.layers" in name for name in report.masks)
    for name, value in model.state_dict().items():
        assert name in report.masks or torch.equal(value, before[name]), name


def test_samples_that_pass_together_measure_what_they_measure_alone() -> None:
    """Up to rounding: how many rows a product has may change how it is summed."""

    def norms(batch_size: int) -> Report:
        return prune(families.model(), families.tokens(5), WANDA, batch_size=batch_size)

    alone, together = norms(1), norms(3)
    differing = sum(int((alone.masks[n] != together.masks[n]).sum()) for n in alone.masks)
    assert differing <= 4
    assert [layer.tokens for layer in alone.layers] == [layer.tokens for layer in together.layers]


def test_experts_are_measured_sample_by_sample_whatever_the_batch_size() -> None:
    alone = prune(families.model("mixtral"), families.tokens(5), WANDA, batch_size=1)
    together = prune(families.model("mixtral"), families.tokens(5), WANDA, batch_size=3)
    assert [layer.tokens for layer in alone.layers] == [layer.tokens for layer in together.layers]


def test_what_stays_dense_takes_no_part_in_the_allocation() -> None:
    """The others give what equal shares would take from them, to the weight."""
    model = families.model("longcat")
    report = prune(model, families.tokens(), Recipe(method="wanda", allocate="owl"))
    pruned = [layer for layer in report.layers if not layer.dense]
    assert len(pruned) < len(report.layers)
    assert sum(layer.removed for layer in pruned) == sum(layer.size for layer in pruned) // 2
