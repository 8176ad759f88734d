"""Recipes: validated, and the same on disk as in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from symprune.errors import SympruneError
from symprune.recipe import Recipe


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_recipe_survives_a_file(tmp_path: Path, suffix: str) -> None:
    recipe = Recipe(method="lp", params={"p": "inf", "strategy": "s2"}, pattern="4:8", seed=3)
    recipe.save(tmp_path / f"r.{suffix}")
    assert Recipe.load(tmp_path / f"r.{suffix}") == recipe
    assert recipe.params["p"] == float("inf")


def test_the_default_is_ria_at_one_half_per_row() -> None:
    recipe = Recipe()
    assert (recipe.method, recipe.sparsity, recipe.group) == ("ria", 0.5, "row")
    assert recipe.criterion.defaults["alpha"] == 0.5
    assert recipe.describe() == "ria, 50 % per row"
    assert Recipe(pattern="2:4").target_sparsity == 0.5


def test_changes_displace_what_they_contradict() -> None:
    recipe = Recipe(method="ria", params={"alpha": 1}, sparsity=0.6)
    assert recipe.with_changes(pattern="2:4").sparsity is None
    assert recipe.with_changes(pattern="2:4").with_changes(sparsity=0.7).pattern is None
    assert recipe.with_changes(method="magnitude").params == {}
    assert recipe.with_changes(seed=1).params == {"alpha": 1.0}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sparsity": 1.0}, "outside"),
        ({"sparsity": -0.1}, "outside"),
        ({"sparsity": "half"}, "outside"),
        ({"sparsity": 0.5, "pattern": "2:4"}, "not both"),
        ({"pattern": "4:2"}, "4:2"),
        ({"pattern": "2:4", "group": "layer"}, "own group"),
        ({"group": "column"}, "column"),
        ({"method": "wnada"}, "did you mean wanda"),
        ({"method": "magnitude", "params": {"alpha": 1}}, "no parameter 'alpha'"),
        ({"sparsty": 0.5}, "did you mean sparsity"),
        ({"nsamples": 0}, "nsamples"),
        ({"seqlen": 1.5}, "seqlen"),
        ({"token_limit": 0.5}, "token_limit 0.5"),
        ({"token_limit": "long"}, "token_limit long"),
    ],
)
def test_a_bad_recipe_says_what_is_wrong(values: dict[str, object], said: str) -> None:
    with pytest.raises(SympruneError, match=said):
        Recipe.from_dict(values)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SympruneError, match=r"nothing\.yaml"):
        Recipe.load(tmp_path / "nothing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("method: [ria")
    with pytest.raises(SympruneError, match=r"broken\.yaml"):
        Recipe.load(broken)
    broken.write_text("- ria")
    with pytest.raises(SympruneError, match="names and values"):
        Recipe.load(broken)


@pytest.mark.parametrize("name", ["fast", "mask-only", "balanced", "best"])
def test_shipped_recipes_load_by_name(name: str) -> None:
    assert Recipe.named(name).target_sparsity == 0.5


@pytest.mark.parametrize("name", ["mask-only", "best"])
def test_a_pattern_displaces_what_a_sparsity_needs(name: str) -> None:
    recipe = Recipe.named(name)
    assert recipe.allocation is not None
    changed = recipe.with_changes(pattern="2:4")
    assert changed.sparsity is None and changed.allocation is None
    with pytest.raises(SympruneError, match="leave out the allocation"):
        recipe.with_changes(pattern="2:4", allocate="owl")


def test_an_unknown_recipe_names_those_there_are() -> None:
    with pytest.raises(SympruneError, match="balanced, best, fast"):
        Recipe.named("quick")


@pytest.mark.parametrize(
    ("sparsity", "zero", "grid"),
    [(0, None, "int3z"), (0.5, None, "int3"), (0, False, "int3"), (0.5, True, "int3z")],
)
def test_a_recipe_that_removes_nothing_has_a_level_for_zero(
    sparsity: float, zero: bool | None, grid: str
) -> None:
    values = {"name": "int3"} if zero is None else {"name": "int3", "zero": zero}
    recipe = Recipe(sparsity=sparsity, values=values)
    assert recipe.rounding is not None and recipe.rounding.grid.name == grid
    other = recipe.with_changes(sparsity=0.25)
    assert other.rounding is not None
    assert other.rounding.grid.name == ("int3z" if zero else "int3")


def test_eight_bits_have_a_zero_anyway() -> None:
    recipe = Recipe(sparsity=0, values="int8")
    assert recipe.rounding is not None and recipe.rounding.grid.name == "int8"
    with pytest.raises(SympruneError, match="leave out its zero"):
        Recipe(values={"name": "int8", "zero": False})
