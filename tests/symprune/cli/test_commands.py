"""The commands, as a user types them, in a process of their own where the exit code matters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from symprune import MaskSet
from symprune.cli import main
from symprune.errors import SympruneError

COMMANDS = (
    "prune", "refine", "sweep", "eval", "inspect", "report", "bench", "generate", "pack", "unpack",
    "models", "methods",
)  # fmt: skip
SMALL = [
    "--calibration",
    "builtin",
    "--nsamples",
    "4",
    "--seqlen",
    "32",
    "--eval-windows",
    "4",
    "--no-samples",
]


def symprune(*arguments: str | Path) -> str:
    """Run a command in this process; a sentence for the user comes as its exception."""
    result = CliRunner().invoke(main.app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def pruned(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("out") / "pruned"
    symprune("prune", "--model", tiny_folder, "--pattern", "2:4", "--output", output, *SMALL)
    return output


def test_prune_leaves_a_plain_checkpoint(pruned: Path, tiny_folder: Path) -> None:
    names = {path.name for path in pruned.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names
    assert {"tokenizer.json", "symprune.json", "masks.safetensors"} <= names
    model = AutoModelForCausalLM.from_pretrained(pruned)
    assert MaskSet.of(model).sparsity() == 0.5
    dense = AutoModelForCausalLM.from_pretrained(tiny_folder)
    MaskSet.load(pruned).apply(dense)
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), dense.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert AutoTokenizer.from_pretrained(pruned)("lambda")["input_ids"]


def test_the_checkpoint_loads_where_symprune_is_not_imported(pruned: Path) -> None:
    code = (
        "import sys; from transformers import AutoModelForCausalLM as A;"
        f"A.from_pretrained({str(pruned)!r});"
        "assert not any(name.split('.')[0] == 'symprune' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_record_says_what_was_done(pruned: Path) -> None:
    record = json.loads((pruned / "symprune.json").read_text())
    assert record["recipe"]["method"] == "ria" and record["recipe"]["pattern"] == "2:4"
    assert record["sparsity"] == 0.5 and len(record["layers"]) == 14
    assert record["perplexity"][0]["data"] == "builtin"
    assert record["perplexity"][0]["pruned"] > 1 and record["perplexity"][0]["windows"] == 4
    assert {"symprune", "torch", "transformers", "python"} <= set(record["versions"])
    assert str(Path.home()) not in json.dumps(record["origin"])


def test_inspect_finds_the_pattern_and_the_recipe(pruned: Path, tiny_folder: Path) -> None:
    shown, everything = symprune("inspect", pruned), symprune("inspect", pruned, "--all")
    assert "2:4" in shown and "50.00 %" in shown and "Made by symprune" in shown
    assert "layers.0" not in shown and "Perplexity on builtin (4 x 32 tokens)" in shown
    assert "layers.0" in everything and '"method": "ria"' in everything
    dense = symprune("inspect", tiny_folder)
    assert "dense" in dense and "recipe is unknown" in dense


def test_inspect_sees_transposed_weights_the_right_way_round(tmp_path: Path) -> None:
    import families

    families.model("gpt2").save_pretrained(tmp_path / "gpt2")
    families.tokenizer().save_pretrained(tmp_path / "gpt2")
    out = tmp_path / "out"
    symprune("prune", "--model", tmp_path / "gpt2", "--pattern", "2:4", "-o", out, *SMALL)
    symprune("inspect", out, "--json", tmp_path / "facts.json")
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert {matrix["pattern"] for matrix in facts["matrices"]} == {"2:4"}
    assert len(facts["matrices"]) == 8


def test_eval_prints_and_writes_the_perplexity(pruned: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    shown = symprune(
        "eval", "--model", pruned, "--data", "builtin", "--seqlen", "32", "--windows", "4",
        "--json", out,
    )  # fmt: skip
    result = json.loads(out.read_text())
    record = json.loads((pruned / "symprune.json").read_text())
    assert result["perplexity"] == pytest.approx(record["perplexity"][0]["pruned"], rel=1e-5)
    assert f"{result['perplexity']:.3f}" in shown


def test_options_override_a_recipe_file(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "method: wanda\nparams: {alpha: 2}\nsparsity: 0.25\ntoken_limit: 3\n"
    )
    symprune(
        "prune", "--model", tiny_folder, "--recipe", tmp_path / "r.yaml", "--alpha", "0.5",
        "--group", "layer", "--token-limit", "0", "--output", tmp_path / "out", "--no-eval", *SMALL,
    )  # fmt: skip
    recipe = json.loads((tmp_path / "out" / "symprune.json").read_text())["recipe"]
    assert recipe["params"] == {"alpha": 0.5}
    assert (recipe["method"], recipe["sparsity"], recipe["group"]) == ("wanda", 0.25, "layer")
    assert "token_limit" not in recipe


def test_sequence_length_is_capped_and_said(tiny_folder: Path, tmp_path: Path) -> None:
    shown = symprune(
        "prune", "--model", tiny_folder, "--calibration", "builtin", "--nsamples", "2",
        "--eval-windows", "1", "--output", tmp_path / "out",
    )  # fmt: skip
    assert "seqlen is 64, not 2048" in shown


def test_a_users_own_method_is_used(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine_cli.py").write_text(
        "def backwards(weight, *, power=1.0):\n    return -(weight.abs() ** power)\n"
    )
    symprune(
        "prune", "--model", tiny_folder, "--method", "mine_cli:backwards", "--set", "power=2",
        "--output", "out", "--no-eval",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained("out")
    weight = model.model.layers[0].mlp.up_proj.weight
    dense = AutoModelForCausalLM.from_pretrained(tiny_folder).model.layers[0].mlp.up_proj.weight
    assert dense.abs()[weight == 0].mean() > dense.abs()[weight != 0].mean()


def test_refine_starts_from_saved_masks(tiny_folder: Path, pruned: Path, tmp_path: Path) -> None:
    shown = symprune(
        "refine", "--model", tiny_folder, "--masks", pruned, "--refine", "r2-dsnot",
        "--refine-layers", "all", "--gamma2", "0.01", "--report-error", "--eval-windows", "2",
        "--output", tmp_path / "out",
    )  # fmt: skip
    assert "of the mean" in shown and "held-out" in shown and "exchanged" in shown
    record = json.loads((tmp_path / "out" / "symprune.json").read_text())
    assert record["recipe"]["refine"]["gamma2"] == 0.01
    assert record["recipe"]["pattern"] == "2:4" and record["sparsity"] == 0.5
    refined, base = MaskSet.load(tmp_path / "out"), MaskSet.load(pruned)
    assert any(value < 1 for value in refined.overlap(base).values())
    assert sum(layer["exchanged"] for layer in record["layers"]) > 0


def test_a_permuted_checkpoint_is_plain_and_keeps_its_pattern(
    tiny_folder: Path, tmp_path: Path
) -> None:
    prune = ("prune", "--model", tiny_folder, "--pattern", "2:4", "--permute", "heads,mlp")
    shown = symprune(*prune, "--output", tmp_path / "out", *SMALL)
    assert "2:4 with mlp and heads permuted" in " ".join(shown.split())
    record = json.loads((tmp_path / "out" / "symprune.json").read_text())
    assert record["recipe"]["permute"] == "mlp,heads"
    assert any("matrices were permuted: the retained score rose" in n for n in record["notes"])
    masks = MaskSet.load(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name in masks:
        weight = model.get_parameter(name)
        assert (weight.reshape(-1, 4).ne(0).sum(1) == 2).all() and not weight[~masks[name]].any()
    refused = ("refine", "--model", tiny_folder, "--masks", tmp_path / "out")
    with pytest.raises(SympruneError, match="Masks made with --permute fit the weights beside"):
        symprune(*refused, "--output", tmp_path / "refined", *SMALL)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("pattern: '2:4'\npermute: [mlp, residual]\n")
    plain = ("prune", "--model", tiny_folder, "--recipe", recipe, "--permute", "none", "--no-eval")
    symprune(*plain, "--output", tmp_path / "plain", *SMALL)
    assert "permute" not in json.loads((tmp_path / "plain" / "symprune.json").read_text())["recipe"]


@pytest.mark.parametrize("update", ["lsq", "sparsegpt", "admm", "alps", None])
def test_refining_starts_from_masks_however_they_were_reached(
    tiny_folder: Path, tmp_path: Path, update: str | None
) -> None:
    """Rounds and an allocation made them; a refinement takes them as they are."""
    shared = ("--model", tiny_folder, *SMALL)
    made, out = tmp_path / "made", tmp_path / "out"
    symprune("prune", *shared, "--recipe", "best", "--no-eval", "--output", made)
    asked = ("--update", update) if update else ()
    symprune(
        "refine", *shared, "--masks", made, "--refine", "swap", *asked, "--no-eval", "--output", out
    )
    record = json.loads((out / "symprune.json").read_text())
    assert record["recipe"].get("update", {}).get("name") == update
    assert "allocate" not in record["recipe"]
    refined, base = MaskSet.load(out), MaskSet.load(made)
    for name in base:
        assert torch.equal(refined[name].sum(1), base[name].sum(1)), name  # what a row keeps
    assert any(value < 1 for value in refined.overlap(base).values())
    dense = AutoModelForCausalLM.from_pretrained(tiny_folder).state_dict()
    sparse = AutoModelForCausalLM.from_pretrained(out).state_dict()
    as_dense = all(torch.equal(sparse[name], dense[name] * refined[name]) for name in base)
    assert as_dense == (update is None)


def test_a_sweep_prints_and_resumes(tiny_folder: Path, tmp_path: Path) -> None:
    grid, out = tmp_path / "grid.yaml", tmp_path / "cells.jsonl"
    grid.write_text(
        "methods: [magnitude, ria]\nsparsities: [0.5]\ncalibration: builtin\nnsamples: 2\n"
        "seqlen: 32\neval_data: builtin\neval_windows: 2\n"
    )
    first = symprune("sweep", "--model", tiny_folder, "--grid", grid, "-o", out)
    assert "ria" in first and "2 cells" in first
    before = out.read_bytes()
    symprune("sweep", "--model", tiny_folder, "--grid", grid, "-o", out)
    assert out.read_bytes() == before


def test_report_draws_a_run(pruned: Path, tmp_path: Path) -> None:
    symprune("report", pruned, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "down_proj" in page and "symprune prune" in page
    with pytest.raises(SympruneError, match="exists"):
        symprune("report", pruned, "-o", tmp_path / "page.html")


def test_zero_shot_tasks_run_from_local_files(tiny_folder: Path, tmp_path: Path) -> None:
    rows = [
        {"goal": f"question {n}", "sol1": "the value", "sol2": "an if", "label": n % 2}
        for n in range(4)
    ]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = symprune(
        "eval", "--model", tiny_folder, "--tasks", "piqa", "--task-data", tmp_path, "--limit", "3",
        "--json", tmp_path / "out.json",
    )  # fmt: skip
    assert "piqa" in shown
    result = json.loads((tmp_path / "out.json").read_text())["zeroshot"]
    assert result["tasks"]["piqa"]["samples"] == 3
    with pytest.raises(SympruneError, match="arc_easy"):
        symprune("eval", "--model", "no-model", "--tasks", "arc_easy", "--task-data", tmp_path)
    with pytest.raises(SympruneError, match="go with --tasks"):
        symprune("eval", "--model", tiny_folder, "--limit", "3")


def test_models_and_methods_are_listed() -> None:
    assert "meta-llama/Llama-2-7b-hf" in symprune("models")
    shown = symprune("methods")
    assert "stochria" in shown and "beta=0.1" in shown
    assert "symprune" in symprune("--version")


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_every_command_has_help(command: list[str]) -> None:
    assert len(symprune(*command, "--help")) > 200


BAD = [
    (["--sparsity", "1.5"], "Sparsity 1.5 is outside"),
    (["--sparsity", "0.5", "--pattern", "2:4"], "not both"),
    (["--pattern", "3:7"], "does not divide the 32 input channels"),
    (["--method", "wandaa"], "did you mean wanda"),
    (["--method", "magnitude", "--alpha", "1"], "no parameter 'alpha'"),
    (["--group", "columns"], "Unknown group"),
    (["--set", "alpha"], "NAME=VALUE"),
    (["--calibration", "no-such-file.txt"], "no-such-file.txt"),
    (["--device", "gpu0"], "Device 'gpu0'"),
    (["--dtype", "int3"], "dtype 'int3'"),
    (["--recipe", "no-such.yaml"], "no-such.yaml"),
    (["--refine", "dsnott"], "Unknown refinement"),
    (["--gamma1", "1"], "gamma1 needs --refine"),
    (["--refine", "dsnot", "--gamma1", "1"], "no 'gamma1'"),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_options_are_one_sentence_and_leave_nothing(
    options: list[str], said: str, tiny_folder: Path, tmp_path: Path
) -> None:
    base = [] if "--calibration" in options else ["--calibration", "builtin"]
    command = ["prune", "--model", tiny_folder, "--nsamples", "2", "--seqlen", "32", *base]
    with pytest.raises(SympruneError, match=said):
        symprune(*command, "--output", tmp_path / "out", *options)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_kept_without_force(tiny_folder: Path, pruned: Path) -> None:
    before = (pruned / "symprune.json").read_bytes()
    with pytest.raises(SympruneError, match="exists"):
        symprune("prune", "--model", tiny_folder, "--output", pruned, *SMALL)
    assert (pruned / "symprune.json").read_bytes() == before


def test_bad_input_is_a_sentence_and_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "symprune", "prune", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.strip().endswith("is not a model: it has no config.json.")


def test_corrupt_weights_leave_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in tiny_folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(SympruneError, match="corrupt safetensors"):
        symprune("prune", "--model", broken, "--output", tmp_path / "out", *SMALL)
    with pytest.raises(SympruneError, match="corrupt safetensors"):
        symprune("inspect", broken)
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_a_disk_that_fills_up_while_writing_leaves_nothing(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(SympruneError, match="disk is full"):
        symprune("prune", "--model", tiny_folder, "--output", tmp_path / "out", *SMALL)
    assert list(tmp_path.iterdir()) == []


def test_samples_can_pass_a_block_together(tiny_folder: Path, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for size, folder in (("1", alone), ("3", together)):
        symprune("prune", "--model", tiny_folder, "--output", folder, "--batch-size", size, *SMALL)
    overlap = MaskSet.load(alone).overlap(MaskSet.load(together))
    assert min(overlap.values()) > 0.99  # rounding may decide between two weights, not more


def test_values_are_asked_for_beside_a_recipe_and_for_saved_masks(
    tiny_folder: Path, pruned: Path, tmp_path: Path
) -> None:
    alone = tmp_path / "alone"
    symprune(
        "prune", "--model", tiny_folder, "--sparsity", "0", "--values", "int4",
        "--values-head", "int8", "--output", alone, *SMALL,
    )  # fmt: skip
    record = json.loads((alone / "symprune.json").read_text())
    said = "all weights kept, int4 values by descent, embeddings and head int8"
    assert record["description"] == said and record["removed"] == 0
    again = tmp_path / "again"
    symprune(
        "refine", "--model", tiny_folder, "--masks", pruned, "--refine", "none", "--values", "int3",
        "--output", again, *SMALL,
    )  # fmt: skip
    record = json.loads((again / "symprune.json").read_text())
    assert record["recipe"]["values"]["name"] == "int3" and record["sparsity"] == 0.5
    ours, theirs = MaskSet.load(again), MaskSet.load(pruned)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(SympruneError, match="Unknown values 'int5'"):
        symprune("prune", "--model", tiny_folder, "--values", "int5", *SMALL)
