"""Pruning to values on a grid: the model has them, the report keeps them, nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from torch import Tensor

import symprune
from symprune import MaskSet, Recipe, SympruneError, fed
from symprune.engine import decide
from symprune.engine.head import head_parameters
from symprune.jobs.preparation import default_output
from symprune.models.layout import find_layout
from symprune.stats import GRAM, SQUARE, ChannelStats

ROUNDS = {"name": "lsq", "rounds": 2}


def assert_on_grid(model: Any, report: Any) -> None:
    """Every matrix is what its codes, scales and mask say."""
    matrices = find_layout(model).all_matrices()
    assert {m.name for m in matrices} <= set(report.values)
    for matrix in matrices:
        keep = matrix.slice_of(report.masks[matrix.parameter_name])
        expected = report.values[matrix.name].dense(keep).to(matrix.weight.dtype)
        assert torch.equal(matrix.weight, expected), matrix.name


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(method="wanda", values="int4"),
        Recipe(method="wanda", pattern="2:4", refine="swap", values="int8"),
        Recipe(method="wanda", update=ROUNDS, values="int3"),
        Recipe(method="magnitude", update="sparsegpt", values={"name": "int2", "solve": "gptq"}),
        Recipe(method="magnitude", group="layer", values={"name": "int4", "solve": "nearest"}),
        Recipe(method="wanda", allocate="owl", values="int4"),
        Recipe(values="int4", sparsity=0),
    ],
    ids=lambda recipe: recipe.describe(),
)
def test_every_step_may_be_followed_by_values(recipe: Recipe, family: str) -> None:
    model = families.model(family)
    report = symprune.prune(model, families.tokens(16), recipe)
    assert_on_grid(model, report)
    assert report.sparsity == pytest.approx(recipe.target_sparsity, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_computed_in_half_precision_has_them_rounded_and_keeps_them_exact(
    dtype: torch.dtype,
) -> None:
    model = families.model().to(dtype)
    assert_on_grid(model, symprune.prune(model, families.tokens(16), Recipe(values="int4")))


def test_a_mask_is_the_criterions_own() -> None:
    recipe = Recipe(method="wanda")
    plain = symprune.prune(families.model(), families.tokens(), recipe).masks
    valued = symprune.prune(
        families.model(), families.tokens(), recipe.with_changes(values="int4")
    ).masks
    first = [name for name in plain if ".layers.0." in name]
    assert first and all(torch.equal(plain[name], valued[name]) for name in first)


def test_with_nothing_removed_there_is_no_mask_and_no_criterion() -> None:
    recipe = Recipe.named("mask-only").with_changes(update="lsq", token_limit=None)
    recipe = recipe.with_changes(sparsity=0, values="int4")
    assert recipe.refine is recipe.update is recipe.allocate is None
    assert recipe.describe() == "all weights kept, int4 values by descent"
    assert decide.needs(recipe).inputs == {GRAM} and not decide.needs(recipe).outputs
    report = symprune.prune(families.model(), families.tokens(), recipe)
    assert report.removed == 0 and not report.notes


def test_values_that_look_at_no_activations_need_no_text() -> None:
    recipe = Recipe(sparsity=0, values={"name": "int8", "solve": "nearest"})
    model = families.model()
    assert_on_grid(model, symprune.prune(model, None, recipe))


def test_saved_masks_stay_and_get_values() -> None:
    made = symprune.prune(families.model(), families.tokens(), Recipe(pattern="2:4")).masks
    model = families.model()
    recipe = Recipe(pattern="2:4", values="int4")
    report = symprune.prune(model, families.tokens(), recipe, base=made)
    assert_on_grid(model, report)
    assert all(torch.equal(report.masks[name], made[name]) for name in made)


def test_figures_tell_of_the_rounding() -> None:
    errors = {}
    for values in (None, "int8", "int4", "int2"):
        report = symprune.prune(
            families.model(), families.tokens(32), Recipe(method="wanda", values=values),
            report_error=True, held_out=families.tokens(8, seed=1),
        )  # fmt: skip
        figures = report.layers[0].figures
        errors[values] = figures["relative_error"]
        if values is not None:
            assert figures["relative_error"] < figures["relative_error_base"]
        assert not any("On held-out tokens" in note for note in report.notes)
    assert errors["int8"] < errors["int4"] < errors["int2"]


def test_an_expert_no_token_came_by_is_on_the_grid_of_those_it_is_stored_with() -> None:
    model = families.model("mixtral")
    recipe = Recipe(method="wanda", values="int4")
    report = symprune.prune(model, families.tokens(1, 2), recipe)
    assert_on_grid(model, report)
    unseen = [layer for layer in report.layers if layer.dense]
    assert unseen and all(layer.removed == 0 for layer in unseen)
    assert any("rounded to the nearest" in note for note in report.notes)


def test_embeddings_and_head_are_rounded_too() -> None:
    for family in ("llama", "smollm"):
        model = families.model(family)
        dense = {name: each.detach().clone() for name, each in head_parameters(model).items()}
        assert len(dense) == (1 if family == "smollm" else 2)
        report = symprune.prune(model, families.tokens(), Recipe(values_head="int8"))
        for name, parameter in head_parameters(model).items():
            assert torch.equal(parameter, report.values[name].dense())
            assert 0 < (parameter - dense[name]).norm() < 0.02 * dense[name].norm()


def test_statistics_of_two_halves_decide_what_those_of_the_whole_decide() -> None:
    """Whole numbers add up without a rounding, in whatever order."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (8, 20, 70), generator=generator).float()
    weight = torch.randn(12, 70, generator=generator)

    def measured(part: Tensor) -> ChannelStats:
        stats = ChannelStats(70, (SQUARE, GRAM))
        stats.add(part)
        return stats

    halves = measured(x[5:])
    halves.merge(measured(x[:5]))
    for recipe in (Recipe(method="wanda", values="int4"), Recipe(sparsity=0, values="int2")):
        one, two = (
            decide.decide("w", "mlp", weight, stats, None, recipe)
            for stats in (measured(x), halves)
        )
        assert one.values is not None and two.values is not None
        assert torch.equal(one.keep, two.keep)
        assert torch.equal(one.values.codes, two.values.codes)
        assert torch.equal(one.values.scales, two.values.scales)


@pytest.mark.parametrize("options", [{"values": "int4"}, {"values_head": "int8"}])
def test_federated_pruning_says_that_it_decides_no_values(options: dict[str, Any]) -> None:
    with pytest.raises(SympruneError, match="is not decided federatedly"):
        fed.prune(families.model(), [families.tokens()], Recipe(**options))


def test_a_recipe_with_values_survives_a_file_and_names_its_output(tmp_path: Path) -> None:
    recipe = Recipe(values={"name": "int4", "sweeps": 5}, values_head="int8", pattern="2:4")
    recipe.save(tmp_path / "r.yaml")
    assert Recipe.load(tmp_path / "r.yaml") == recipe
    assert recipe.describe() == "ria, 2:4, int4 values by descent, embeddings and head int8"
    assert default_output("a/tiny", recipe) == "tiny-ria-2of4-int4"
    assert default_output("a/tiny", Recipe(values="int8", sparsity=0)) == "tiny-int8"
    assert recipe.with_changes(sparsity=0).keeps_all
    with pytest.raises(SympruneError, match="values_head must be one of int8, int4, not 'int2'"):
        Recipe(values_head="int2")


def test_masks_alone_do_not_know_of_values() -> None:
    model = families.model()
    report = symprune.prune(model, families.tokens(), Recipe(method="wanda", values="int4"))
    found = MaskSet.of(model)
    assert all(torch.equal(found[name], report.masks[name]) for name in found)
