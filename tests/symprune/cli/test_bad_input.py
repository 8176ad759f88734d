"""Bad input is one sentence that names the culprit, before any work, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import families
import pytest
from typer.testing import CliRunner

from symprune.checkpoint.streamed_blocks import StreamedBlocks
from symprune.cli import main
from symprune.errors import Interrupted, SympruneError
from symprune.models import hub

SMALL = ["--calibration", "builtin", "--nsamples", "2", "--seqlen", "32", "--no-samples"]
OWN_METHODS = {
    "syntax": "def score(:\n",
    "raises": "def score(weight):\n    raise KeyError('z')\n",
    "shape": "def score(weight):\n    return weight[0]\n",
    "number": "def score(weight):\n    return 3\n",
    "ends": "import sys\nsys.exit(3)\n",
    "value": "score = 3\n",
}


def refuse(*arguments: str | Path, said: str) -> None:
    """A command ends in one sentence."""
    result = CliRunner().invoke(main.app, [str(a) for a in arguments])
    assert isinstance(result.exception, SympruneError), (result.exception, result.output)
    sentence = str(result.exception)
    assert re.search(said, sentence), sentence
    assert "\n" not in sentence and sentence[-1] in ".?"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("syntax", "Cannot load method .*SyntaxError"),
        ("raises", "Method .* fails: KeyError"),
        ("shape", r"returns \(32,\) for a matrix of \(32, 32\)"),
        ("number", "returns a int for a matrix"),
        ("ends", "Cannot load method .*SystemExit, 3"),
        ("value", "is not a function"),
    ],
)
def test_a_method_of_the_users_that_does_not_work_is_named(
    module: str, said: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"own_{module}_{os.getpid()}"
    Path(f"{name}.py").write_text(OWN_METHODS[module])
    command = ["prune", "--model", tiny_folder, "-o", "out", "--no-eval", *SMALL]
    refuse(*command, "--method", f"{name}:score", said=said)
    assert not Path("out").exists() and not Path(".out.partial").exists()


BAD_RECIPES = {
    "method: {name: ria}": "A method is a name",
    "method: [ria]": "A method is a name",
    "refine: 7": "Refinement 7 is neither",
    "refine: {name: [x]}": "Unknown refinement",
    "params: 7": "parameters of method ria are not names and values",
    "params: {alpha: .nan}": "alpha .* cannot be nan",
    "permute: mlp": "Without an N:M pattern the order of channels changes nothing",
    "pattern: '2:4'\npermute: 7": "permute is a list of mlp, heads, residual, not 7",
    "pattern: '2:4'\npermute: [mlp, q]": "permute must be one of mlp, heads, residual, all",
    "nsamples: true": "nsamples must be a whole number",
    "seed: a": "seed must be a whole number",
    "calibration: 7": "calibration is a name",
    "a: " + "[" * 50_000: "neither YAML nor JSON",
    "params: &x {alpha: 1}\nrefine: *x": "neither YAML nor JSON",
}


@pytest.mark.parametrize("text", BAD_RECIPES, ids=lambda text: text[:30])
def test_a_recipe_that_makes_no_sense_is_a_sentence(
    text: str, tiny_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "r.yaml").write_text(text)
    command = ["prune", "--model", tiny_folder, "-o", tmp_path / "out", *SMALL]
    refuse(*command, "--recipe", tmp_path / "r.yaml", said=BAD_RECIPES[text])


BAD_OPTIONS = [
    (["--alpha", "inf"], "alpha .* power from 0 to 16"),
    (["--alpha", "-3"], "alpha .* power from 0 to 16"),
    (["--alpha", "1e9"], "alpha .* power from 0 to 16"),
    (["--method", "stochria", "--beta", "2"], "stochria takes beta in"),
    (["--alpha", "nan"], "alpha .* cannot be nan"),
    (["--nsamples", "1000000000000"], "nsamples must be a whole number from 1 to"),
    (["--seqlen", "1000000000000"], "seqlen must be a whole number from 1 to"),
    (["--seed", "99999999999999999999999"], "seed must be a whole number"),
    (["--device-map", "balanced"], "needs several accelerators"),
    (["--device-map", "spread"], "Unknown device map"),
    (["--refine", "r2-dsnot", "--gamma1", "inf"], "gamma1 must be a number"),
    (["--refine", "dsnot", "--var-power", "inf"], "var_power must be a number"),
    (["--refine", "dsnot", "--update-threshold", "-1"], "update_threshold must be 0 or more"),
    (["--json", "."], "Cannot write .: it is not a file"),
    (["--json", "nowhere/x.json"], "Cannot write nowhere/x.json"),
    (["--json", "notes.txt"], "Cannot write notes.txt: it holds something else"),
    (["--json", "config.json"], "Cannot write config.json: it holds something else"),
    (["--log", "config.json"], "Cannot write config.json: it holds something else"),
    (["--recipe", "/dev/zero"], "Recipe /dev/zero is not a file"),
    (["--recipe", "huge.yaml"], "Recipe huge.yaml is larger than 10,000,000 bytes"),
    (["--log", "."], "Cannot write .: it is not a file"),
    (["--log", "nowhere/x.log"], "Cannot write nowhere/x.log"),
    (["--log", "notes.txt"], "Cannot write notes.txt: it holds something else"),
    (["--calibration", "/dev/zero"], "/dev/zero is not a file"),
    (["--eval-data", "/dev/zero"], "/dev/zero is not a file"),
    (["--eval-data", "short.txt"], "evaluation text has .* too few for one window"),
]


@pytest.mark.parametrize(("options", "said"), BAD_OPTIONS, ids=lambda each: " ".join(each))
def test_what_can_be_checked_before_the_work_is(
    options: list[str],
    said: str,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("precious")
    Path("short.txt").write_text("if x")
    config = (tiny_folder / "config.json").read_text()
    Path("config.json").write_text(config)
    with Path("huge.yaml").open("wb") as file:
        file.truncate(10**7 + 1)

    def begin(*_: object) -> None:
        pytest.fail("The work has begun.")

    monkeypatch.setattr(StreamedBlocks, "begin", begin)
    refuse("prune", "--model", tiny_folder, "-o", "out", *SMALL, *options, said=said)
    there = {"notes.txt", "short.txt", "config.json", "huge.yaml"}
    assert {path.name for path in tmp_path.iterdir()} == there
    assert Path("notes.txt").read_text() == "precious"
    assert Path("config.json").read_text() == config


def test_a_result_and_a_log_are_written_again(tiny_folder: Path, tmp_path: Path) -> None:
    targets = ["--json", tmp_path / "result.json", "--log", tmp_path / "log.jsonl"]
    command = ["prune", "--model", tiny_folder, "-o", tmp_path / "out", "--no-eval", *SMALL]
    for _ in range(2):
        arguments = [str(part) for part in (*command, "--force", *targets)]
        CliRunner().invoke(main.app, arguments, catch_exceptions=False)
    assert json.loads((tmp_path / "result.json").read_text())["written_by"].startswith("symprune ")


def test_masks_of_another_model_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    families.model("gpt2").save_pretrained(tmp_path / "gpt2")
    families.tokenizer().save_pretrained(tmp_path / "gpt2")
    made = tmp_path / "made"
    command = ["prune", "--model", tiny_folder, "-o", made, "--no-eval", *SMALL]
    CliRunner().invoke(main.app, [str(part) for part in command], catch_exceptions=False)
    options = ["--masks", made, "-o", tmp_path / "out", "--no-eval", *SMALL]
    refuse("refine", "--model", tmp_path / "gpt2", *options, said="masks are another model's")
    assert {path.name for path in tmp_path.iterdir()} == {"gpt2", "made"}


def test_tokens_beyond_the_vocabulary_are_a_sentence(tiny_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_folder.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    plain = json.loads((model / "tokenizer.json").read_text())
    plain["model"]["vocab"] = {word: n + 10**6 for word, n in plain["model"]["vocab"].items()}
    (model / "tokenizer.json").write_text(json.dumps(plain))
    options = ["--seqlen", "32", "--windows", "1"]
    refuse("eval", "--model", model, "--data", "builtin", *options, said="not in the model's voc")
    options = ["-o", tmp_path / "out", *SMALL]
    refuse("prune", "--model", model, *options, said="not in the model's voc")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_name_that_is_almost_right_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = ConnectionError("no route to host")
    said = str(hub.explain(hub.resolve("lama2-7b"), unreachable))
    assert said.endswith("did you mean llama2-7b?")
    said = str(hub.explain(hub.resolve("llama2-7b"), unreachable))
    assert "no network" in said and "--model smollm2-135m --calibration builtin" in said
    gated = type("GatedRepoError", (Exception,), {})
    said = str(hub.explain(hub.resolve("llama2-7b"), gated("401 Client Error")))
    assert "not logged in" in said and "accept its licence" in said
    said = str(hub.explain(hub.resolve("llama2-7b"), gated("403 Client Error")))
    assert "is gated" in said and "not logged in" not in said


def test_an_interruption_says_what_is_kept(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = StreamedBlocks.finish

    def interrupt(self: StreamedBlocks, index: int, *rest: object) -> None:
        finish(self, index, *rest)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(StreamedBlocks, "finish", interrupt)
    command = ["prune", "--model", str(tiny_folder), "-o", str(tmp_path / "out"), *SMALL]
    result = CliRunner().invoke(main.app, command)
    assert isinstance(result.exception, Interrupted)
    said = str(result.exception)
    assert "1 finished block is kept in" in said and "MB" in said and "same command" in said
    monkeypatch.setattr(
        StreamedBlocks, "begin", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    result = CliRunner().invoke(main.app, [*command, "--restart"])
    assert "nothing is kept" in str(result.exception) and list(tmp_path.iterdir()) == []
