"""User text is never markup, and every end of a command is one sentence."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from rich.markup import render
from typer.testing import CliRunner

from symprune.cli import console, main
from symprune.eval import tables
from symprune.fed.compare.plots import plot_values

ODD = ("nope[/b]", "data[old]/m", "x:imp:a", "[bold]", "a[link=file:///x]b", "\\[x]")
STYLES = {"bold", "dim"}


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "symprune", *arguments],
        capture_output=True, text=True, check=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_sentence_shows_what_the_user_typed(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    console.complain(f"There is no folder {name}.")
    console.notes([f"About {name}."])
    console.say_saved(name)
    console.say("In ", (name, "bold"), f", not {name}")
    console.out.print(f"plain {name}")
    shown = capfd.readouterr()
    assert f"There is no folder {name}." in shown.err
    for line in (f"About {name}.", f"Saved to {name}", f"In {name}, not {name}", f"plain {name}"):
        assert line in shown.out


@pytest.mark.parametrize("name", ODD)
def test_a_table_and_a_bar_show_what_the_user_typed(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    row = {"model": name, "data": name, "dense": 2.0, "perplexity": 3.0, "deviation": None}
    row |= {"seeds": 1, "sparsity": 0.5, "seconds": 1.0, "description": name}
    console.out.print(tables.sweep([row]))
    with console.display() as shown:
        shown.tell(f"Loading {name}")
        shown.begin(0, 1, name)
    seen = capfd.readouterr()
    assert seen.out.count(name) == 3
    assert f"Loading {name}" in seen.err and seen.err.count(name) >= 2


def test_what_would_steer_the_terminal_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    console.complain("a\x1b[2Jb\x07.")
    assert "a[2Jb." in capfd.readouterr().err


def test_a_folder_with_an_odd_name_is_named_as_it_is(tmp_path: Path) -> None:
    done = run("inspect", str(tmp_path / "nope[/b]"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "nope[/b]" in done.stderr


def test_names_in_a_picture_are_no_formulas(tmp_path: Path) -> None:
    series = {"a $x^$ b": [[1.0], [2.0]]}
    plot_values([1.0, 2.0], series, tmp_path / "p.png", ("x", "y"), title="$\\no$")
    assert (tmp_path / "p.png").stat().st_size > 1000


def commands(command: click.Command, name: str = "symprune") -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for each, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {each}")


ALL = dict(commands(typer.main.get_command(main.app)))


@pytest.mark.parametrize("name", ALL)
def test_help_swallows_no_brackets(name: str) -> None:
    """Help is markup, written here: only known styles may stand in brackets."""
    command = ALL[name]
    written = [command.help or "", *(getattr(p, "help", "") or "" for p in command.params)]
    for text in written:
        styles = {str(span.style) for span in render(inspect.cleandoc(text)).spans}
        assert styles <= STYLES, text


def test_the_help_of_methods_says_which_way_round_a_matrix_is() -> None:
    assert "[out, in]" in CliRunner().invoke(main.app, ["methods", "--help"]).output


def test_no_file_prints_markup() -> None:
    """A tag in a string would be shown as it is: consoles read no markup."""
    root = Path(main.__file__).parent.parent.parent
    for folder in ("symprune/cli", "eval", "fed"):
        for path in (root / folder).rglob("*.py"):
            for call in re.findall(
                r"(?:print|add_row|update|status|notes|say)\([^\n]*", path.read_text()
            ):
                assert not re.search(r"\[/?(bold|dim|red|yellow)", call), f"{path}: {call}"


FAILURES = {
    "KeyError: 'x'": "{}['x']",
    "RuntimeError: first": "(_ for _ in ()).throw(RuntimeError('first\\nsecond'))",
    "not enough memory": "(_ for _ in ()).throw(MemoryError())",
}


@pytest.mark.parametrize("said", FAILURES)
@pytest.mark.parametrize("debug", [False, True])
def test_the_unexpected_is_one_sentence_and_exit_code_1(said: str, debug: bool) -> None:
    code = (
        "import sys; from symprune.cli import console; sys.argv[1:] = sys.argv[1:];"
        f"console.run(lambda: {FAILURES[said]})"
    )
    arguments = ["--debug"] if debug else []
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and said in done.stderr
    assert ("Traceback" in done.stderr) == debug and ("--debug" in done.stderr) != debug
    assert debug or done.stderr.count("\n") == 1


def test_debug_may_stand_anywhere_and_shows_the_trace(tmp_path: Path) -> None:
    for arguments in (["--debug", "inspect"], ["inspect", "--debug"]):
        done = run(*arguments, str(tmp_path / "none"))
        assert done.returncode == 2 and "Traceback" in done.stderr
        assert "Error: There is no folder" in done.stderr
    arguments = ["symprune", "generate", "--debug", "--", "--debug"]
    assert console.take_flag(arguments, "--debug")
    assert arguments == ["symprune", "generate", "--", "--debug"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_under_the_output_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "symprune", "models"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("Error: The disk is full") and done.stderr.count("\n") == 1


def test_a_reader_that_stops_and_a_closed_output_are_no_errors() -> None:
    command = f"{sys.executable} -m symprune models"
    for line in (f"{command} | head -n 1 > /dev/null", f"{command} >&-"):
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
        assert done.stderr == "", line
