"""The help of every command is whole, however narrow the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from click import Command
from typer.main import get_command
from typer.testing import CliRunner

from symprune.cli.main import app
from symprune.cli.screen.help import App


def commands(command: Command, *path: str) -> Iterator[tuple[Command, tuple[str, ...]]]:
    yield command, path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *path, name)


@pytest.mark.parametrize("width", [40, 80])
def test_no_name_is_cut_and_no_option_is_missing(width: int) -> None:
    for command, path in commands(get_command(app)):
        said = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": str(width)})
        assert said.exit_code == 0 and "…" not in said.output, path
        words = set(re.findall(r"[\w.-]+", said.output))
        names = {name for each in command.params for name in each.opts if name.startswith("--")}
        assert names | set(getattr(command, "commands", {})) <= words, path
        lines = said.output.splitlines()
        assert all(len(line) <= width or len(line.split()) == 1 for line in lines), path


def test_a_narrow_help_says_what_the_wide_one_does() -> None:
    said = CliRunner().invoke(app, ["bench", "--help"], env={"COLUMNS": "40"}).output
    flat = " ".join(said.split())
    assert flat.startswith("Usage: ") and "bench [OPTIONS] MODEL..." in flat
    assert "--prompt-tokens INTEGER RANGE Tokens of the prompt. [default: 128; x>=1]" in flat
    assert "Perplexity --eval / --no-eval Measure perplexity." in flat
    assert "[the physical cores]" in flat and "[dim]" not in flat and "\\[" not in flat


def test_names_that_leave_no_room_make_a_list_of_a_wide_help_too() -> None:
    crowded = App()

    @crowded.command()
    def go(an_option_with_a_long_name: bool = False, another: int = 0) -> None:
        """Nothing."""

    said = CliRunner().invoke(crowded, ["--help"], env={"COLUMNS": "80"}).output
    flat = " ".join(said.split())
    assert "--an-option-with-a-long-name / --no-an-option-with-a-long-name" in flat
    assert "│" not in said
    wide = CliRunner().invoke(crowded, ["--help"], env={"COLUMNS": "120"}).output
    assert "│" in wide and "…" not in wide
