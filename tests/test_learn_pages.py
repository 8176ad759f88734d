"""The pages to learn from: their Python runs, and every command and option in them exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from click import Command
from typer.main import get_command

from symprune.cli.main import app
from symprune.jobs.sweep import Grid

PAGES = sorted((Path(__file__).parents[1] / "docs" / "learn").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    lines = "\n".join(blocks(page, "console")).replace("\\\n", " ").splitlines()
    return [shlex.split(line[2:]) for line in lines if line.startswith("$ symprune ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    assert blocks(page, "python")
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec", dont_inherit=True), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_have_only_options_there_are(page: Path) -> None:
    assert len(commands(page)) > 3
    for words in commands(page):
        command: Command = get_command(app)
        for word in words[1:]:
            below = getattr(command, "commands", {})
            if word not in below:
                break
            command = below[word]
        taken = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
        options = {word for word in words if re.match(r"--?[a-zA-Z]", word)}
        assert command.name != "symprune" and options <= taken, words


def test_the_grid_of_the_tutorial_is_one() -> None:
    (text,) = blocks(next(page for page in PAGES if page.stem == "tutorial"), "yaml")
    assert len(Grid.from_dict(yaml.safe_load(text)).recipes()) == 12
