"""Models whose channels are permuted: they compute what they did, and N:M keeps more of them."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from pretend_device import DEVICE, PretendDevice
from torch import nn

import symprune
from symprune import Recipe, SympruneError, fed
from symprune.engine import forward
from symprune.engine.blocks import Blocks
from symprune.engine.collect import Collector
from symprune.engine.permute import inside
from symprune.engine.permute.inside import AFTER, BEFORE
from symprune.engine.permute.links import Link
from symprune.engine.permute.orders import Orders
from symprune.models.layout import find_layout

INSIDE = Recipe(method="wanda", pattern="2:4", permute="mlp,heads")
ALL = INSIDE.with_changes(permute="all")
EVERY = [*families.FAMILIES, "falcon-h1", "gpt-oss"]


def model_of(family: str) -> Any:
    """A model whose norms and biases have something to lose as well."""
    made = families.model(family)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return made


def permute(model: nn.Module, parts: str) -> dict[str, dict[str, float]]:
    """The model with its channels in another order and nothing pruned; what matrices retain."""
    recipe, layout = Recipe("magnitude", pattern="2:4", permute=parts), find_layout(model)
    figures: dict[str, dict[str, float]] = {}
    with forward.ready(model):
        orders = Orders(layout, Blocks(layout), families.tokens(), recipe, lambda *_: None)
        for index, block in enumerate(layout.blocks):
            found = layout.matrices(index)
            figures |= orders.order(index, block, found, Collector(), Collector()).figures
    return figures


def assert_same_outputs(model: nn.Module, other: nn.Module) -> None:
    with torch.no_grad():
        before, after = (each(families.tokens(), use_cache=False).logits for each in (model, other))
    assert float((after - before).abs().max()) < 2e-6 * float(before.abs().max())


@pytest.mark.parametrize("family", EVERY)
def test_values_and_hidden_channels_change_places_and_outputs_do_not(family: str) -> None:
    dense, model = model_of(family), model_of(family)
    figures = permute(model, "mlp,heads")
    assert_same_outputs(dense, model)
    known = {matrix.name for matrix in find_layout(model).all_matrices()}
    assert figures and figures.keys() <= known
    assert all(each[AFTER] >= each[BEFORE] for each in figures.values())
    before = dict(dense.named_parameters())
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert len(changed) >= 4 * len(find_layout(model).blocks)


@pytest.mark.parametrize("family", [*families.FAMILIES, "gpt-oss"])
def test_the_hidden_states_change_places_and_outputs_do_not(family: str) -> None:
    dense, model = model_of(family), model_of(family)
    figures = permute(model, "residual")
    assert_same_outputs(dense, model)
    mean = {name: sum(each[name] for each in figures.values()) for name in (BEFORE, AFTER)}
    assert mean[AFTER] > mean[BEFORE]
    before = dense.get_input_embeddings().weight
    assert not torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "falcon"])
def test_masks_are_two_of_four_and_true_for_the_permuted_weights(family: str) -> None:
    model = model_of(family)
    report = symprune.prune(model, families.tokens(), ALL)
    for matrix in find_layout(model).all_matrices():
        keep = matrix.slice_of(report.masks[matrix.parameter_name])
        assert (keep.reshape(len(keep), -1, 4).sum(2) == 2).all()
        assert not matrix.weight[~keep].any() and matrix.weight[keep].all()
    known = [layer.figures for layer in report.layers if AFTER in layer.figures]
    assert len(known) == len(report.layers)
    assert report.notes[-1].startswith(f"The input channels of {len(known)} of {len(known)} ")


def test_the_retained_score_that_is_reported_is_that_of_the_mask() -> None:
    """Of the last matrix of a block: nothing behind it has a say, its inputs are the same."""
    dense, model, plain = (families.model() for _ in range(3))
    report = symprune.prune(model, families.tokens(), INSIDE)
    before = symprune.prune(plain, families.tokens(), INSIDE.with_changes(permute=None))
    name = "model.layers.0.self_attn.o_proj.weight"
    layers = {layer.name: layer.figures for layer in report.layers}
    seen: list[torch.Tensor] = []
    hooked = dense.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda _, given: seen.append(given[0].detach())
    )
    with torch.no_grad():
        for sample in families.tokens():
            dense(sample.unsqueeze(0))
    hooked.remove()
    norm = torch.stack(seen).square().sum((0, 1, 2)).div(len(seen)).sqrt()
    weight = dense.get_parameter(name).detach()
    score = weight.abs() * norm
    kept = (score * before.masks[name]).sum() / score.sum()
    assert layers[name][BEFORE] == pytest.approx(float(kept), rel=1e-5)
    # The columns of the new matrix are those of the old one; each head's are its own.
    new = model.get_parameter(name).detach()
    where = [
        int(((weight == column[:, None]) | (column[:, None] == 0)).all(0).nonzero()[0])
        for column in new.T
    ]
    assert sorted(where) == list(range(32)) and where != list(range(32))
    assert all(old // 8 == place // 8 for place, old in enumerate(where))
    kept = (score[:, where] * report.masks[name]).sum() / score.sum()
    assert layers[name][AFTER] == pytest.approx(float(kept), rel=1e-5)
    assert layers[name][AFTER] > layers[name][BEFORE]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "magnitude"},
        {"method": "stochria"},
        {"method": "symwanda"},
        {"method": "wanda-plus-plus"},
        {"refine": "swap"},
        {"refine": {"name": "r2-dsnot", "layers": "all"}, "token_limit": 2},
        {"update": {"name": "lsq", "rounds": 2}},
        {"update": "sparsegpt"},
        {"update": "lsq", "values": "int4"},
        {"values": "int3", "reconstruct": {"name": "block", "epochs": 1}},
    ],
    ids=str,
)
@pytest.mark.parametrize("parts", ["mlp,heads", "all"])
def test_every_step_goes_on_from_the_permuted_block(parts: str, changes: dict[str, Any]) -> None:
    """Statistics that did not follow their channels would make masks as bad as any."""
    errors = []
    for permuted in (parts, None):
        model = families.model()
        recipe = INSIDE.with_changes(permute=permuted, **changes)
        options = {"held_out": families.tokens(4, seed=9), "report_error": True}
        report = symprune.prune(model, families.tokens(10), recipe, **options)
        first = [layer for layer in report.layers if "layers.0.mlp.down" in layer.name]
        errors.append(first[0].figures["relative_error"])
        for keep in report.masks.values():
            pattern = recipe.n_of_m
            assert pattern is not None
            assert (keep.reshape(-1, pattern.m).sum(1) == pattern.n).all()
    assert errors[0] < 1.02 * errors[1]


def test_an_update_of_permuted_weights_is_the_update_of_the_weights() -> None:
    """With the order that is found undone, the fitted matrix is nearer to the dense outputs than
    the masked one, by as much as its figures say."""
    model = families.model()
    recipe = INSIDE.with_changes(update="lsq")
    report = symprune.prune(model, families.tokens(10), recipe, report_error=True)
    for layer in report.layers:
        assert layer.figures["relative_error"] < layer.figures["relative_error_base"]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_device_gives_what_main_memory_does(family: str) -> None:
    model, here = model_of(family), model_of(family)
    symprune.prune(here, families.tokens(2), ALL, batch_size=1)
    with PretendDevice() as device:
        there = device.take(model)
        symprune.prune(there, families.tokens(2).to(DEVICE), ALL, batch_size=1)
        found = {name: p.detach().cpu() for name, p in there.named_parameters()}
    for name, parameter in here.named_parameters():
        assert torch.equal(parameter, found[name]), name


def test_sixteen_bits_are_permuted_as_well() -> None:
    model = families.model().to(torch.bfloat16)
    report = symprune.prune(model, families.tokens(), ALL)
    assert all(layer.figures[AFTER] > 0.5 for layer in report.layers)


def test_blocks_of_another_kind_are_left_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-Next's attention is linear in some blocks, where no value stands for itself."""
    model = model_of("qwen3-next")
    with pytest.raises(SympruneError, match="The first block has no values of heads whose order"):
        permute(model, "mlp,heads")
    figures = permute(model, "mlp")
    assert figures and all("attn" not in name for name in figures)
    assert_same_outputs(model_of("qwen3-next"), model)
    monkeypatch.setattr(inside.BlockOrders, "missing", lambda *_: [])
    report = symprune.prune(model_of("qwen3-next"), families.tokens(), INSIDE)
    sentence = "There are blocks without values of heads whose order could be changed."
    assert report.notes.count(sentence) == 1


def test_channels_that_pass_a_norm_have_their_order() -> None:
    """Between gate and down nothing may look at all channels."""
    model = families.model()
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.LayerNorm(48))
    with pytest.raises(SympruneError, match="The first block has no hidden channels whose order"):
        symprune.prune(model, families.tokens(), INSIDE)


def test_hidden_states_that_are_scaled_by_channel_have_their_order() -> None:
    model = families.model()
    scale = torch.rand(32, generator=torch.Generator().manual_seed(0))
    first = model.model.layers[1]
    first.mlp.register_forward_hook(lambda _, __, out: out * scale)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(SympruneError, match="block 1 treats them differently: leave residual out"):
        symprune.prune(model, families.tokens(), ALL)
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, parameter)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_blocks_that_leave_something_for_others_are_refused(family: str) -> None:
    with pytest.raises(SympruneError, match="leave more than hidden states for later ones"):
        symprune.prune(families.model(family), families.tokens(), INSIDE)


def test_auto_is_all_where_the_structure_allows_it() -> None:
    auto, every = families.model(), families.model()
    symprune.prune(auto, families.tokens(), INSIDE.with_changes(permute="auto"))
    symprune.prune(every, families.tokens(), ALL)
    for one, other in zip(auto.parameters(), every.parameters(), strict=True):
        assert torch.equal(one, other)


def test_auto_leaves_what_has_an_order_and_says_so() -> None:
    auto = INSIDE.with_changes(permute="auto")
    seeing, inside_alone = families.looking("llava"), families.looking("llava")
    report = symprune.prune(seeing, families.tokens(), auto)
    assert any("it has parts besides its blocks" in note for note in report.notes)
    symprune.prune(inside_alone, families.tokens(), INSIDE)
    for one, other in zip(seeing.parameters(), inside_alone.parameters(), strict=True):
        assert torch.equal(one, other)

    report = symprune.prune(model_of("qwen3-next"), families.tokens(), auto)
    assert any("The first block has no values of heads" in note for note in report.notes)
    assert any(AFTER in layer.figures for layer in report.layers)


def test_auto_permutes_nothing_where_blocks_leave_something_for_others() -> None:
    plain, auto = families.model("gemma3n"), families.model("gemma3n")
    symprune.prune(plain, families.tokens(), INSIDE.with_changes(permute=None))
    report = symprune.prune(auto, families.tokens(), INSIDE.with_changes(permute="auto"))
    assert any("leave more than hidden states" in note for note in report.notes)
    for one, other in zip(plain.parameters(), auto.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("way", [{"sequential": True}, {"targets": "dense", "update": "lsq"}])
def test_auto_says_that_it_permutes_nothing_of_groups(way: dict[str, Any]) -> None:
    plain, auto = families.model(), families.model()
    recipe = INSIDE.with_changes(permute=None, **way)
    given: dict[str, Any] = {"data": families.tokens(10), "held_out": families.tokens(2, seed=9)}
    symprune.prune(plain, recipe=recipe, **given)
    report = symprune.prune(auto, recipe=recipe.with_changes(permute="auto"), **given)
    assert any("No channel was permuted" in note for note in report.notes)
    for one, other in zip(plain.parameters(), auto.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_part_that_sees_is_not_left_behind() -> None:
    model = families.looking("llava")
    with pytest.raises(SympruneError, match="it has parts besides its blocks"):
        permute(model, "residual")
    assert permute(model, "mlp,heads")


def test_a_wrong_idea_of_a_block_is_noticed_and_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if values could change heads."""
    find = inside.find_links

    def all_alike(probe: Any) -> list[Link]:
        found = find(probe)
        units = [torch.arange(len(link.columns)) for link in found]
        return [
            Link(link.consumers, link.columns, link.producers, (every,))
            for link, every in zip(found, units, strict=True)
        ]

    monkeypatch.setattr(inside, "find_links", all_alike)
    model = families.model("opt")
    with pytest.raises(SympruneError, match="computes something else when channels change"):
        symprune.prune(model, families.tokens(), INSIDE)
    before = dict(families.model("opt").named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_without_a_pattern_there_is_nothing_to_permute() -> None:
    with pytest.raises(SympruneError, match="Without an N:M pattern"):
        Recipe(permute="mlp")
    assert ALL.with_changes(sparsity=0.5).permute is None
    auto = ALL.with_changes(permute="auto")
    assert auto.permuted_parts == ALL.permuted_parts
    assert auto.with_changes(sparsity=0.5).permuted_parts == ()
    assert auto.with_changes(sparsity=0.5).with_changes(pattern="4:8").permuted_parts
    assert auto.with_changes(sequential=True).permuted_parts == ()
    assert auto.describe() == "wanda, 2:4 with channels permuted"
    assert ALL.describe() == "wanda, 2:4 with mlp and heads and residual permuted"


def test_masks_that_were_made_earlier_are_refused() -> None:
    model = families.model()
    masks = symprune.prune(model, families.tokens(), INSIDE).masks
    for recipe in (INSIDE, INSIDE.with_changes(permute="auto")):
        with pytest.raises(SympruneError, match="Masks made with --permute fit the weights beside"):
            symprune.prune(families.model(), families.tokens(), recipe, base=masks)


def test_federated_pruning_says_that_it_moves_no_weights() -> None:
    with pytest.raises(SympruneError, match="--permute takes an order"):
        fed.prune(families.model(), [families.tokens(), families.tokens(seed=1)], INSIDE)
