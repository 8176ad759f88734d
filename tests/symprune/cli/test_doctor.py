"""The doctor says what there is, and no token; completion answers without loading torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from symprune.cli import main
from symprune.jobs.doctor import NEEDED, advise, examine

SECRET = "hf_aVerySecretToken"


def test_the_doctor_says_what_there_is_and_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = tmp_path / "found.json"
    shown = CliRunner().invoke(main.app, ["doctor", "--json", str(out)], catch_exceptions=False)
    assert shown.exit_code == 0 and "from HF_TOKEN, not shown" in shown.output
    assert SECRET not in shown.output + out.read_text()
    found = json.loads(out.read_text())
    assert set(NEEDED) <= found["versions"].keys() and found["versions"]["torch"]
    assert sum(device["chosen"] for device in found["devices"]) == 1
    assert 0 < found["memory"]["free_bytes"] <= found["memory"]["bytes"]


def test_the_doctor_advises_on_what_is_missing() -> None:
    found = examine(Path.cwd())
    found["kernels"] = {"levels": [], "used": None, "compiler": None, "missing": "No kernels"}
    found["hub"] |= {"token": None, "offline": True}
    found["versions"]["gguf"] = None
    said = " ".join(advise(found))
    assert "No kernels: packed models run slowly" in said and "C compiler" in said
    assert "hf auth login" in said and "Not installed: gguf" in said
    assert "HF_HUB_OFFLINE" in said


def test_completion_completes_commands_and_options_without_torch() -> None:
    """As the script that `--install-completion` leaves asks for it."""
    code = (
        "import sys\nfrom symprune.cli.main import app\n"
        "try:\n    app(prog_name='symprune')\n"
        "finally:\n    print('heavy' if 'torch' in sys.modules else 'light')\n"
    )

    def complete(*words: str) -> list[str]:
        environment = {
            **os.environ, "_SYMPRUNE_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(("symprune", *words)), "COMP_CWORD": str(len(words)),
        }  # fmt: skip
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.stdout.split()

    assert complete("pu") == ["push", "light"]
    assert {"--pattern", "--push-to-hub", "light"} <= set(complete("prune", "--p"))
