"""The programs in examples/ and the code in CONTRIBUTING.md run as they stand."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import families
import loopback
import pytest
import torch

import symprune
from symprune import Recipe
from symprune.checkpoint.packed import pack
from symprune.fed import ALGORITHMS, build
from symprune.jobs import pruning
from symprune.refine import REFINEMENTS

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
# What each is given, and what it must print.
PROGRAMS: dict[str, tuple[str, str]] = {
    "compare_criteria": ("--methods wanda ria", r"ria +0\.\d+"),
    "federated_language_model": ("--rounds 2", "Merged, 50.0% of its weights are zero"),
    "federated_masks": ("--rounds 2", r"ef21, top-k:0.1\+int4 +\d+\.\d% +50\.0%"),
    "federated_on_flower": ("", r"Flower trained 14 matrices, 50\.0% of it zeros"),
    "federated_pruning": ("", "those of central pruning: yes"),
    "federated_training": ("--rounds 3", r"fedht +accuracy .* with 90% zeros"),
    "keep_zeros_while_training": ("--steps 3", "Afterwards 50.0% of the weights are zero"),
    "prune_a_model": ("", "In total 50.0% of"),
    "run_a_packed_model": ("", r"int4, 5\d% zeros.*bits a weight"),
    "your_own_algorithm": ("--rounds 3", r"sign-descent +accuracy"),
    "your_own_criterion": ("", r"power 1: the masks overlap with Wanda's by 100\.0%"),
    "your_own_model": ("", "50% of it is pruned"),
    "your_own_refinement": ("", r"[1-9]\d* weights changed places"),
}


@pytest.fixture(autouse=True)
def registries_as_they_were() -> Iterator[None]:
    """What an example registers is gone again after it."""
    criteria = vars(sys.modules[symprune.criterion.__module__])["_REGISTRY"]
    with patch.dict(criteria), patch.dict(ALGORITHMS), patch.dict(REFINEMENTS):
        yield


def run(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    runpy.run_path(str(EXAMPLES / f"{program}.py"), run_name="__main__")


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_runs_and_prints_what_it_shows(
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments, expected = PROGRAMS[program]
    if program == "federated_on_flower":  # as it stands below, which takes minutes
        pytest.importorskip("flwr")
        from symprune.fed.flower import deploy

        monkeypatch.setattr(deploy, "Deployment", loopback.without_processes())
        monkeypatch.setenv("PRUNED_MODEL", "")
        arguments += f" --folder {tmp_path}"
    run(program, arguments.split(), monkeypatch)
    assert re.search(expected, capsys.readouterr().out)


@pytest.mark.slow
def test_the_whole_road_on_flower_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("flwr")
    monkeypatch.setenv("PRUNED_MODEL", "")
    _, expected = PROGRAMS["federated_on_flower"]
    run("federated_on_flower", ["--folder", str(tmp_path)], monkeypatch)
    assert re.search(expected, capsys.readouterr().out)
    assert (tmp_path / "run" / "logs" / "node-1.log").exists()


def test_an_example_prunes_and_saves_a_model_it_is_given(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "pruned"
    given = f"--model {tiny_folder} --output {output} --sparsity 0.25 --seqlen 32"
    run("prune_a_model", given.split(), monkeypatch)
    assert symprune.MaskSet.load(output).sparsity() == pytest.approx(0.25)
    assert "In total 25.0% of" in capsys.readouterr().out


def test_every_example_is_run_here_and_is_short() -> None:
    programs = {path.stem: path for path in EXAMPLES.glob("*.py") if path.stem != "tiny"}
    assert programs.keys() == PROGRAMS.keys()
    lengths = {name: len(path.read_text().splitlines()) for name, path in programs.items()}
    assert max(lengths.values()) < 60, lengths


WORKED = (
    *("federated/your-own-algorithm", "federated/your-own-model", "federated/fine-tuning"),
    "federated",
)


@pytest.mark.parametrize("page", WORKED)
def test_the_code_of_a_worked_page_runs(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, object] = {}
    assert blocks
    for block in blocks:
        exec(compile(block, f"{page}.md", "exec", dont_inherit=True), names)


# Pages whose code begins with what a reader has: a model, texts, a function.
CONTINUED = (
    "running",
    "threat-model",
    *(f"federated/{name}" for name in ("cohort_squeeze", "fedsparse", "pruning", "scafflix")),
    "federated/similarity_network",
)


@pytest.fixture(scope="module")
def at_hand(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a packed model named PACKED."""
    folder = tmp_path_factory.mktemp("reader")
    recipe = Recipe("magnitude", calibration="builtin", nsamples=2, seqlen=16)
    pruning.prune(pruning.Job(str(tiny_folder), recipe, folder / "half", evaluate=False))
    pack(folder / "half", folder / "PACKED")
    return folder


@pytest.mark.parametrize("page", CONTINUED)
def test_the_code_of_a_page_runs_with_what_a_reader_has(
    page: str, at_hand: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(at_hand)
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    tokens = [torch.arange(32).view(2, 16) + first for first in (3, 40)]
    names: dict[str, object] = {
        "build": build, "model": families.model("smollm"), "tokens_of_one": tokens[0],
        "tokens_of_another": tokens[1],
    }  # fmt: skip
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, f"{page}.md", "exec", dont_inherit=True), names)


def test_the_code_in_the_contributors_page_runs_and_its_tests_pass() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "CONTRIBUTING.md", "exec"), names)
    tests = {name: test for name, test in names.items() if name.startswith("test_")}
    assert len(tests) == 4
    for test in tests.values():
        assert callable(test)
        test()
