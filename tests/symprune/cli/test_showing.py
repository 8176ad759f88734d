"""What a user sees of the difference: samples, one sentence, and what to do next."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from symprune.cli import main
from symprune.errors import SympruneError

SMALL = ["--calibration", "builtin", "--nsamples", "2", "--seqlen", "16", "--eval-windows", "2"]


def symprune(*arguments: str | Path) -> str:
    result = CliRunner().invoke(main.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_ends_with_samples_a_sentence_and_commands_that_work(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = symprune("prune", "-m", tiny_folder, "-o", "out", "-p", "lambda if", *SMALL)
    assert "The same prompts, continued:\nlambda if\n  dense" in shown
    assert "Half the weights gone, perplexity " in shown
    lines = [line.partition("#")[0].split() for line in shown.splitlines() if "# " in line]
    assert [line[1] for line in lines] == ["pack", "bench", "report"]
    symprune(*lines[0][1:])
    assert (tmp_path / "out-packed" / "packed.json").is_file()
    symprune(*lines[2][1:])
    page = (tmp_path / "out.html").read_text()
    assert "The same prompts, continued" in page and "Half the weights gone" in page


def test_prompts_that_nobody_continues_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    asked = ["--no-samples", "--prompt", "x", "-o", tmp_path / "out"]
    with pytest.raises(SympruneError, match="Give --prompt or --no-samples, not both"):
        symprune("prune", "-m", tiny_folder, *SMALL, *asked)
