"""The pages: all are on the site, their links lead somewhere, and their commands exist."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click import Command
from typer.main import get_command

from symprune.cli.main import app

ROOT = Path(__file__).parents[1]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def entries(nav: Any) -> Iterator[str]:
    """The pages of a navigation, however deep."""
    for entry in nav:
        for value in entry.values():
            yield from entries(value) if isinstance(value, list) else [value]


def test_every_page_is_in_the_sites_navigation() -> None:
    docs = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    made = {"index.md", "contributing.md", "changelog.md"}
    assert sorted(entries(SITE["nav"])) == sorted(docs | made)


def test_the_site_asks_no_other_machine_for_anything() -> None:
    assert SITE["theme"]["font"] is False
    assert "extra_javascript" not in SITE and "extra_css" not in SITE


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings that GitHub and the site agree on."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found, seen = set(), Counter[str]()
    for heading in re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
        kept = re.sub(r"[^\w\s-]", "", words.lower()).strip()
        on_github, on_site = kept.replace(" ", "-"), re.sub(r"[-\s]+", "-", kept)
        seen[on_site] += 1
        if on_github == on_site and on_site.isascii() and seen[on_site] == 1:
            found.add(on_site)
    return found


def test_anchors_are_those_of_headings() -> None:
    text = "# One `two`, three\n```\n# not this\n```\n## A - b\n## [Four](x.md)\n## Four\n"
    assert anchors(text) == {"one-two-three", "four"}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_anchors_that_a_page_links_to_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lost = []
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        place = page if not file else (page.parent / file).resolve()
        if place.suffix == ".md" and anchor not in anchors(place.read_text(encoding="utf-8")):
            lost.append(f"{file}#{anchor}")
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:symprune|fed|eval|scripts|tests|examples)/[\w./-]+\.\w+)`", text)
    assert [file for file in named if not (ROOT / file).exists()] == []


def test_tests_that_a_page_names_exist() -> None:
    """What a page promises by a test's name is worth what the test is."""
    files = (ROOT / "tests").rglob("test_*.py")
    tests = {test for file in files for test in re.findall(r"def (test_\w+)", file.read_text())}
    named = {
        (name(page), test)
        for page in PAGES
        for test in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 50 and {pair for pair in named if pair[1] not in tests} == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_end_at_100_characters_unless_a_table_needs_more(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [n for n, line in enumerate(lines, 1) if len(line) > 100 and not line.startswith("|")]
    assert long == []


def test_every_option_of_every_command_is_on_the_options_page_and_no_other() -> None:
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(--[\w-]+)", page)) - {"--no-", "--help"}
    completion = {"--install-completion", "--show-completion"}
    taken = set(options(get_command(app))) - {"--help"} - completion
    assert {option for option in taken if not option.startswith("--no-")} <= documented <= taken


def commands(page: Path) -> list[list[str]]:
    """The words of every line of a page's consoles and shells that calls symprune."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:console|bash|sh)\n(.*?)```", text, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.removeprefix("$ ") for line in lines]
    return [shlex.split(line, comments=True) for line in found if line.startswith("symprune ")]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_of_a_page_have_only_options_there_are(page: Path) -> None:
    for words in commands(page):
        command: Command = get_command(app)
        taken = {"--quiet", "--verbose", "--debug"}
        for word in words[1:]:
            below = getattr(command, "commands", {})
            if word not in below:
                break
            command = below[word]
        taken |= {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
        options = {word for word in words if re.match(r"--?[a-zA-Z]", word)}
        assert options <= taken | {"--help", "-h"}, words
        assert command.name != "symprune" or options, words


def test_many_pages_have_commands() -> None:
    assert sum(len(commands(page)) > 0 for page in PAGES) > 15
    learnt = [page for page in PAGES if page.parent.name == "learn"]
    assert learnt and all(len(commands(page)) > 3 for page in learnt)


def options(command: Command) -> Iterator[str]:
    for below in getattr(command, "commands", {}).values():
        yield from options(below)
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        yield from (name for name in names if name.startswith("--"))
