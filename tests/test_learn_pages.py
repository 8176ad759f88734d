"""The pages to learn from: their Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from symprune.jobs.sweep import Grid

PAGES = sorted((Path(__file__).parents[1] / "docs" / "learn").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    assert blocks(page, "python")
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec", dont_inherit=True), names)


def test_the_grid_of_the_tutorial_is_one() -> None:
    (text,) = blocks(next(page for page in PAGES if page.stem == "tutorial"), "yaml")
    assert len(Grid.from_dict(yaml.safe_load(text)).recipes()) == 12
