"""What the repository tells a forge and a contributor's machine to run exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    ruled = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    return set(phony.split()) & ruled


def commands(workflow: Path) -> str:
    steps = [step for job in read(workflow)["jobs"].values() for step in job["steps"]]
    return "\n".join(step["run"] for step in steps if "run" in step)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_only_targets_of_the_makefile(workflow: Path) -> None:
    called = set(re.findall(r"\bmake ([a-z-]+)", commands(workflow)))
    assert called and called <= targets()


def test_every_supported_python_is_tested_and_the_wheel_is_started() -> None:
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    jobs = read(workflow)["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    assert {"make test", "make wheel"} <= set(commands(workflow).splitlines())
    assert "bin/symprune --version" in commands(workflow)


def test_hooks_before_a_commit_are_local_or_pinned() -> None:
    for repository in read(ROOT / ".pre-commit-config.yaml")["repos"]:
        assert repository["repo"] == "local" or repository["rev"]
        for hook in repository["hooks"]:
            assert hook["id"]
            assert repository["repo"] != "local" or hook["entry"].startswith(".venv/bin/ruff ")


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_an_issue_template_asks_something_it_needs(template: Path) -> None:
    form = read(template)
    assert form["name"] and form["description"]
    assert any(field.get("validations", {}).get("required") for field in form["body"])


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_a_page_names_only_targets_of_the_makefile(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    called = re.findall(r"(?:^\$ |`)make ([a-z-]+)", text, flags=re.MULTILINE)
    assert called and set(called) <= targets()
