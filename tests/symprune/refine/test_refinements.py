"""Refinements in recipes and in the engine."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch

from symprune import MaskSet, Recipe, prune
from symprune.criteria import available
from symprune.errors import SympruneError
from symprune.models.layout import find_layout
from symprune.refine import REFINEMENTS, choose_refinement


def test_presets_follow_the_base_method_unless_told() -> None:
    chosen = choose_refinement("r2-dsnot")
    assert chosen is not None
    wanda, ria = chosen.keys("wanda"), chosen.keys("ria")
    assert (wanda.grow_relative, wanda.prune_relative, wanda.gamma2) == (True, False, 1e-4)
    assert (ria.grow_relative, ria.prune_relative, ria.gamma2) == (False, True, 1e-3)
    other = choose_refinement({"name": "r2-dsnot", "preset": "wanda", "gamma2": 0.5})
    assert other is not None
    assert other.keys("ria").grow_relative and other.keys("ria").gamma2 == 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("dsnt", "Unknown refinement 'dsnt'; choose dsnot"),
        ({"name": "dsnot", "gamma1": 1}, "dsnot has no 'gamma1'"),
        ({"name": "dsnot", "max_cyles": 1}, "did you mean max_cycles"),
        ({"name": "dsnot", "layers": "some"}, "layers must be one of attn"),
        ({"name": "dsnot", "accept": "any"}, "accept must be one of"),
        ({"name": "dsnot", "max_cycles": 0}, "max_cycles"),
        ({"name": "dsnot", "same_sign": "maybe"}, "same_sign of dsnot cannot be 'maybe'"),
        ({"name": "r2-dsnot", "norm_p": 0.5}, "norm_p"),
        ({"name": "r2-dsnot", "preset": "magnitude"}, "preset must be one of"),
    ],
)
def test_bad_refinements_say_what_is_wrong(options: object, said: str) -> None:
    with pytest.raises(SympruneError, match=said):
        Recipe(refine=options)  # type: ignore[arg-type]


def test_only_the_named_part_of_a_block_is_refined() -> None:
    tokens = families.tokens(6, 24)
    base = prune(families.model(), tokens, Recipe(method="wanda")).masks
    for layers in ("attn", "mlp"):
        recipe = Recipe(method="wanda", refine={"name": "dsnot", "layers": layers})
        model = families.model()
        refined = prune(model, tokens, recipe).masks
        first = [name for name in base if "layers.0." in name]
        changed = {name for name in first if not torch.equal(refined[name], base[name])}
        assert changed and all(("attn" in name) == (layers == "attn") for name in changed)


@pytest.mark.parametrize("name", sorted(REFINEMENTS))
@pytest.mark.parametrize("amount", [{"sparsity": 0.5}, {"group": "layer"}, {"pattern": "2:4"}])
def test_refinement_works_on_every_criterion_and_keeps_the_counts(
    name: str, amount: dict[str, object]
) -> None:
    tokens = families.tokens(3, 16)
    for method in available():
        plain = Recipe(method=method, **amount)  # type: ignore[arg-type]
        recipe = plain.with_changes(refine={"name": name, "layers": "all"})
        report = prune(families.model(), tokens, recipe)
        assert report.sparsity == 0.5
        if "pattern" in amount:
            for mask in report.masks.values():
                assert (mask.reshape(-1, 4).sum(1) == 2).all()


def test_saved_masks_can_be_refined_later() -> None:
    tokens = families.tokens(6, 24)
    recipe = Recipe(method="wanda", refine={"name": "dsnot", "layers": "all"})
    one_go, two_steps = families.model(), families.model()
    base = MaskSet()
    prune(one_go, tokens, recipe)
    for name, mask in prune(families.model(), tokens, Recipe(method="magnitude")).masks.items():
        base[name] = mask
    from_magnitude = prune(two_steps, tokens, recipe, base=base).masks
    assert not all(v == 1.0 for v in from_magnitude.overlap(base).values())
    assert from_magnitude.sparsity() == base.sparsity() == 0.5


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({"update": {"name": "lsq", "rounds": 2}}, "Rounds find the mask themselves"),
        ({"update": "sparsegpt"}, "sparsegpt finds the mask itself unless select is false"),
        ({"allocate": "owl"}, "Masks say how much each layer gives"),
    ],
)
def test_what_would_ignore_given_masks_is_refused(steps: dict[str, Any], said: str) -> None:
    model, tokens = families.model(), families.tokens(2, 8)
    base = prune(families.model(), tokens, Recipe(method="magnitude")).masks
    with pytest.raises(SympruneError, match=said):
        prune(model, tokens, Recipe(**steps), base=base)
    if "update" in steps:
        with pytest.raises(SympruneError, match=f"{said}: leave out the refinement"):
            Recipe(refine="swap", **steps)


def test_errors_are_reported_before_and_after() -> None:
    model, tokens = families.model(), families.tokens(6, 24)
    dense = families.model()
    recipe = Recipe(method="wanda", refine={"name": "dsnot", "layers": "all"})
    report = prune(model, tokens, recipe, report_error=True)
    assert all("relative_error" in layer.to_dict() for layer in report.layers)
    q = report.layers[0].figures
    assert 0 < q["relative_error"] < 1
    assert q["expected_error_after"] < q["expected_error_before"]
    # The first layer's inputs are the dense model's own: its error can be computed directly.
    block = find_layout(dense).blocks[0]
    inputs: list[torch.Tensor] = []
    handle = block.self_attn.q_proj.register_forward_pre_hook(
        lambda _, args: inputs.append(args[0].flatten(0, 1))
    )
    with torch.no_grad():
        for row in tokens:
            dense(input_ids=row[None])
    handle.remove()
    x = torch.cat(inputs)
    w = block.self_attn.q_proj.weight.detach()
    pruned = find_layout(model).blocks[0].self_attn.q_proj.weight.detach()
    direct = torch.linalg.norm(x @ (pruned - w).T) / torch.linalg.norm(x @ w.T)
    assert q["relative_error"] == pytest.approx(float(direct), rel=1e-4)
