"""The command line starts fast: nothing that only says what there is imports torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "numpy", "datasets", "matplotlib", "flwr")
PROGRAM = f"""
import sys
from symprune.cli.main import app
app(sys.argv[1:], standalone_mode=False)
print("heavy:", *(name for name in {HEAVY} if name in sys.modules))
"""


COMMANDS = (
    "",
    "prune",
    "eval",
    "bench",
    "generate",
    "pack",
    "fed",
    "fed run",
    "fed prune",
    "fed deploy",
)


@pytest.mark.parametrize("arguments", ["--version", *(f"{name} --help" for name in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: str) -> None:
    command = [sys.executable, "-c", PROGRAM, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "heavy:"
