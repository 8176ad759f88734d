"""The page of environment variables has every one that the code reads or sets."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
SOURCES = [path for top in ("symprune", "fed", "eval") for path in (ROOT / top).rglob("*.py")]
NAME = re.compile(r"[A-Z][A-Za-z]*(?:_[A-Za-z]+)+|PATH")
OURS = re.compile(r"SYMPRUNE_[A-Z]+")


def mentioned(path: Path) -> set[str]:
    """Names in calls of os.environ, and in tables of variables that are put into one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if "environ" not in ast.unparse(node) or not isinstance(
            node, ast.Call | ast.Subscript | ast.Dict | ast.Compare
        ):
            continue
        for inner in ast.walk(node):
            value = constants.get(inner.id) if isinstance(inner, ast.Name) else None
            value = inner.value if isinstance(inner, ast.Constant) else value
            if isinstance(value, str) and NAME.fullmatch(value):
                found.add(value)
    return found


def test_every_variable_of_the_code_is_on_the_page() -> None:
    code = set().union(*map(mentioned, SOURCES))
    assert {"SYMPRUNE_ASSETS", "WORLD_SIZE", "HF_ENDPOINT", "SYMPRUNE_KERNEL"} <= code
    assert {name for name in code if f"`{name}`" not in PAGE} == set()


def test_every_variable_of_ours_on_the_page_is_in_the_code() -> None:
    everything = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    ours = set(OURS.findall(PAGE))
    assert ours == set(OURS.findall(everything))
