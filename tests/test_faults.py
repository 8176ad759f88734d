"""The list of faults that `make mutants` puts into the code fits the code as it is."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["mutants"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_fault_can_still_be_put_into_the_code(mutants: ModuleType) -> None:
    assert mutants.find_stale(mutants.read_faults()) == []


def test_every_fault_leaves_code_that_can_be_read(mutants: ModuleType) -> None:
    """One that does not would be noticed by any test."""
    for fault in mutants.read_faults():
        text = (ROOT / fault.file).read_text(encoding="utf-8").replace(fault.old, fault.new)
        compile(text, fault.file, "exec")


def test_the_faults_are_many_different_and_in_every_part(mutants: ModuleType) -> None:
    faults = mutants.read_faults()
    assert len(faults) >= 60 and len({fault.broken for fault in faults}) == len(faults)
    assert {"symprune", "fed", "eval"} == Counter(f.file.split("/")[0] for f in faults).keys()
    assert all(fault.broken.endswith(".") for fault in faults)


def test_a_fault_whose_text_is_gone_is_named(mutants: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    fault = mutants.Fault("a.py", "It is broken.", "x = 1", "x = 2", ("a.py",))
    gone = mutants.Fault("a.py", "It is broken.", "y = 1", "y = 2", ("b.py",))
    assert mutants.find_stale([fault], tmp_path) == ["a.py has 2 times, not once: 'x = 1'."]
    assert mutants.find_stale([gone], tmp_path) == [
        "a.py has 0 times, not once: 'y = 1'.",
        "There is no b.py to notice: It is broken.",
    ]
