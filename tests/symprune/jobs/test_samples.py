"""The same prompts by the dense and the pruned model: the text is the models' own, or its absence
is explained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from symprune import Recipe
from symprune.errors import SympruneError
from symprune.jobs import pruning, samples
from symprune.jobs.samples import Continuation, put_together
from symprune.machine import memory
from symprune.models.layout import find_layout

PROMPTS = ("lambda if", "while else")
RECIPE = Recipe("magnitude", sparsity=0.75, calibration="builtin", nsamples=2, seqlen=16)


def prune(folder: Path, output: Path, **settings: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"evaluate": False, "prompts": PROMPTS, **settings}
    return pruning.prune(pruning.Job(str(folder), RECIPE, output, **given))


def write_with_transformers(folder: Path, prompt: str) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    row = model.generate(ids, do_sample=False, max_new_tokens=samples.NEW_TOKENS)[0]
    return str(tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose matrices are large enough to matter for what it writes."""
    folder = tmp_path_factory.mktemp("models") / "writer"
    model = families.model("smollm")
    for matrix in find_layout(model).all_matrices():
        matrix.parameter.data *= 20
    model.save_pretrained(folder)
    families.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def run(writer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "pruned"
    prune(writer, folder)
    return folder


def test_the_record_has_what_transformers_makes_of_the_prompts(run: Path, writer: Path) -> None:
    record = json.loads((run / "symprune.json").read_text())
    assert [sample["prompt"] for sample in record["samples"]] == list(PROMPTS)
    for sample in record["samples"]:
        dense, pruned = sample["continuations"]
        assert (dense["by"], pruned["by"]) == ("dense", "pruned")
        assert dense["text"] == write_with_transformers(writer, sample["prompt"])
        assert pruned["text"] == write_with_transformers(run, sample["prompt"])
    texts = [[each["text"] for each in s["continuations"]] for s in record["samples"]]
    assert any(dense != pruned for dense, pruned in texts)


def test_equal_runs_have_equal_records_samples_included(
    run: Path, writer: Path, tmp_path: Path
) -> None:
    prune(writer, tmp_path / "again")
    again = (tmp_path / "again" / "symprune.json").read_bytes()
    assert again == (run / "symprune.json").read_bytes()


def test_tokens_are_counted_as_the_same_up_to_the_first_that_differs() -> None:
    dense = [Continuation([5, 6, 7, 8], "a")]
    written = {
        "dense": dense,
        "other": [Continuation([5, 6, 9, 8], "b")],
        "short": [Continuation([5], "c")],
    }
    (sample,) = put_together(["p"], written)
    assert [each["same"] for each in sample["continuations"]] == [4, 2, 1]
    assert [each["tokens"] for each in sample["continuations"]] == [4, 4, 1]


def test_a_model_that_does_not_fit_is_not_asked_and_the_note_says_why(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free", lambda device: 1000)
    record = prune(tiny_folder, tmp_path / "out")
    assert record["samples"] == []
    (note,) = [note for note in record["notes"] if "prompts" in note]
    assert re.search(r"in memory as a whole: its weights take .* GB that are free", note)


def test_a_model_that_cannot_write_loses_the_samples_and_nothing_else(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no cache of this kind\nand more")

    monkeypatch.setattr(samples, "continue_prompts", fail)
    record = prune(tiny_folder, tmp_path / "out")
    assert record["samples"] == [] and (tmp_path / "out" / "model.safetensors").is_file()
    assert any(
        note.endswith("the dense model cannot: no cache of this kind") for note in record["notes"]
    )


def test_without_prompts_nothing_is_continued(tiny_folder: Path, tmp_path: Path) -> None:
    assert "samples" not in prune(tiny_folder, tmp_path / "out", prompts=())


@pytest.mark.parametrize(
    ("prompts", "why"),
    [
        (("ok", " \n"), "empty"),
        (("x" * 5000,), "5,000 characters"),
        (("a",) * 17, "at most 16"),
        (("\ud800",), "is not text"),
        (("if " * 600,), "room for 64 tokens"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused_before_any_work(
    prompts: tuple[str, ...], why: str, tiny_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(SympruneError, match=why):
        prune(tiny_folder, tmp_path / "out", prompts=prompts)
    assert list(tmp_path.iterdir()) == []


def test_of_the_built_in_prompts_those_that_fit_are_continued() -> None:
    tokenizer = families.tokenizer()
    config = families.config("smollm")
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in samples.PROMPTS]
    config.max_position_embeddings = sorted(lengths)[1] + samples.NEW_TOKENS
    kept = samples.fitting(samples.PROMPTS, tokenizer, config)
    assert kept == tuple(
        p for p, n in zip(samples.PROMPTS, lengths, strict=True) if n < max(lengths)
    )
    with pytest.raises(SympruneError, match="has room for"):
        samples.fitting((*kept, samples.PROMPTS[lengths.index(max(lengths))]), tokenizer, config)


def test_the_record_says_what_the_weights_took_and_take(run: Path, writer: Path) -> None:
    record = json.loads((run / "symprune.json").read_text())
    assert record["dense_bytes"] == (writer / "model.safetensors").stat().st_size
    assert record["pruned_bytes"] == (run / "model.safetensors").stat().st_size
    assert record["dense_bits_per_weight"] == 32
