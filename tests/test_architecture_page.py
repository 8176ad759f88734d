"""docs/architecture.md is true to the code: what it names exists, and no room is missing."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([\w/]+/)` \|.*\| (.*) \|$", flags=re.MULTILINE)
TOP = re.compile(r"^## (\w+)/:.*?(?=^## )", flags=re.MULTILINE | re.DOTALL)


def rooms() -> set[str]:
    """Every folder with Python files that is installed."""
    found = {
        path.parent for top in ("symprune", "fed", "eval") for path in (ROOT / top).rglob("*.py")
    }
    return {f"{folder.relative_to(ROOT)}/" for folder in found}


def test_every_room_has_its_place_on_the_page() -> None:
    on_the_page = {room for room, _ in ROW.findall(PAGE)}
    roots = {f"{top}/" for top in TOP.findall(PAGE)}
    assert roots == {"symprune/", "fed/", "eval/"}
    assert on_the_page | roots == rooms()


def test_every_file_of_a_room_that_the_page_names_exists() -> None:
    named = [
        f"{room}{file}"
        for room, files in ROW.findall(PAGE)
        for file in re.findall(r"`(.*?)`", files)
    ]
    assert named and [file for file in named if not (ROOT / file).is_file()] == []


def test_every_file_at_the_root_of_a_package_that_the_page_names_exists() -> None:
    for section in TOP.finditer(PAGE):
        files = re.findall(r"^\| `(\w+\.py)` \|", section.group(), flags=re.MULTILINE)
        assert [file for file in files if not (ROOT / section.group(1) / file).is_file()] == []


def test_every_path_that_the_page_names_exists() -> None:
    paths = re.findall(r"`([\w.-]+/[\w./-]*)`", PAGE)
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []
