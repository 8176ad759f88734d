"""How a page begins, below the verdict: the command that does it again, and the recipe."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from symprune.eval.report import page

RECIPE = "recipe.yaml"
AS_IS = (None, "", "auto")


def recipe_text(model: str, recipe: Mapping[str, Any], **options: object) -> str:
    """The command that prunes a model by the recipe, and the recipe, whole. options: of the
    command; those that say nothing are left out."""
    words = ["symprune", "prune", "--model", model, "--recipe", RECIPE]
    for name, value in options.items():
        if value not in AS_IS:
            words += [f"--{name.replace('_', '-')}", str(value)]
    text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True).rstrip()
    whole = page.details(f"{RECIPE}, to be saved where the command runs", page.command(text))
    return f"{page.command(shlex.join(words))}\n{whole}"
