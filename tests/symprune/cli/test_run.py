"""`symprune bench` and `symprune generate`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import packed_models
import pytest
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from symprune.cli import console, main
from symprune.errors import SympruneError
from symprune.runtime import layers
from symprune.runtime.layout import Layout

PROMPT = "if [bold]while[/nothing]"
BENCH = ["--prompt-tokens", "12", "--new-tokens", "4", "--rounds", "1", "--threads", "1"]


def symprune(*arguments: str | Path) -> str:
    """Run a command in this process; a sentence for the user comes as its exception."""
    result = CliRunner().invoke(main.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal wide enough for what is looked for in it."""
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.usefixtures("output")
def test_bench_prints_a_table_and_writes_json_and_a_page(tiny_folder: Path, tmp_path: Path) -> None:
    table, page = tmp_path / "bench.json", tmp_path / "bench.html"
    shown = symprune(
        "bench", tiny_folder, f"{tiny_folder}:bfloat16", *BENCH, "--windows", "2", "--seqlen", "32",
        "--json", table, "--html", page,
    )  # fmt: skip
    record = json.loads(table.read_text())
    assert f"{record['models'][1]['decode_tokens_per_second']:.1f}" in shown
    assert "12 + 4 tokens, 1 thread, 1 round" in shown and "perplexity, builtin (2 x 32)" in shown
    assert "16.00" in shown and "32.00" in shown
    assert page.read_text().endswith("</html>\n")
    again = tmp_path / "again.html"
    symprune("report", table, "-o", again)
    assert again.read_text() == page.read_text()


def test_bench_checks_where_it_writes_before_it_measures(tiny_folder: Path, tmp_path: Path) -> None:
    for option in ("--json", "--html"):
        with pytest.raises(SympruneError, match="not a file in a folder that exists"):
            symprune("bench", tiny_folder, option, tmp_path / "none" / "x")
        with pytest.raises(SympruneError, match="not a file in a folder that exists"):
            symprune("bench", tiny_folder, option, tmp_path)


def test_generate_prints_the_text_alone(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.json"
    options = ["--prompt", PROMPT, "--max-new-tokens", "6", "--json", file]
    shown = symprune("generate", tiny_folder, *options)
    (found,) = json.loads(file.read_text())["continuations"]
    assert shown == f"{PROMPT}{found['text']}\n"
    assert symprune("generate", tiny_folder, *options) == shown


def test_generate_compares_two_models(tiny_folder: Path) -> None:
    typed = f"{tiny_folder}:bfloat16"
    shown = symprune(
        "generate", tiny_folder, "--prompt", PROMPT, "--max-new-tokens", "6", "--compare", typed
    )
    assert shown.count(PROMPT) == 2 and shown.count("tokens/s") == 2
    assert shown.index(tiny_folder.name) < shown.index(PROMPT)


@pytest.fixture(scope="module")
def packed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "packed"
    packed_models.packed("smollm", "int4", around=True).save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of values that are multiplied from their packed form."""
    found: list[str] = []

    def product(blob: Tensor, layout: Layout, x: Tensor, **options: Any) -> Tensor:
        found.append(layout.kind)
        return multiply(blob, layout, x, **options)

    multiply = layers.product
    monkeypatch.setattr(layers, "product", product)
    return found


def test_generate_continues_from_packed_weights(packed_folder: Path, products: list[str]) -> None:
    shown = symprune("generate", packed_folder, "--prompt", "if x", "--max-new-tokens", "6")
    assert {"int4", "int8"} == set(products)
    model = AutoModelForCausalLM.from_pretrained(packed_folder)
    tokenizer = families.tokenizer()
    ids = tokenizer("if x", return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert shown == f"if x{tokenizer.decode(made, skip_special_tokens=True)}\n"


def test_eval_measures_packed_weights(
    packed_folder: Path, products: list[str], tmp_path: Path
) -> None:
    def perplexity(folder: Path) -> float:
        file = tmp_path / "found.json"
        symprune(
            "eval", "--model", folder, "--data", "builtin", "--seqlen", "32", "--windows", "4",
            "--json", file,
        )  # fmt: skip
        return float(json.loads(file.read_text())["perplexity"])

    packed = perplexity(packed_folder)
    assert {"int4", "int8"} == set(products)
    products.clear()
    plain = AutoModelForCausalLM.from_pretrained(packed_folder).dequantize()
    plain.save_pretrained(tmp_path / "plain")
    families.tokenizer().save_pretrained(tmp_path / "plain")
    assert packed == pytest.approx(perplexity(tmp_path / "plain"), rel=0.02) and not products


@pytest.mark.parametrize("options", [[], ["--prompt", "x", "--max-new-tokens", "-1"]])
def test_generate_without_what_it_needs_ends_with_code_2(
    options: list[str], tiny_folder: Path
) -> None:
    result = CliRunner().invoke(main.app, ["generate", str(tiny_folder), *options])
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_what_a_model_writes_cannot_steer_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    console.write("a\x1b[31mb\x07\r\n\tç [bold]c[/bold]\x9b1m")
    assert capsys.readouterr().out == "a[31mb\n\tç [bold]c[/bold]1m"


def test_a_sentence_with_brackets_is_said_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise SympruneError("There is no model folder ./[/x].")

    with pytest.raises(SystemExit, match="2"):
        console.run(fail)
    assert "There is no model folder ./[/x]." in capsys.readouterr().err
