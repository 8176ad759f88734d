"""Two models compared token by token: in memory, on disk, by a run and by `eval --against`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import families
import pytest
import torch

import symprune
from symprune import Recipe, SympruneError
from symprune.checkpoint.packed_shards import open_shards
from symprune.checkpoint.streamed_model import StreamedModel
from symprune.eval import divergence, tables
from symprune.eval.divergence import compare, summary
from symprune.jobs import pruning
from symprune.jobs.evaluate import evaluate
from symprune.jobs.quality.divergence import InMemory, OnDisk, diverge
from symprune.models import hub

TEXT: dict[str, Any] = {"calibration": "builtin", "nsamples": 2, "seqlen": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    families.model().save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def pair(family: str) -> tuple[Any, Any]:
    dense, pruned = families.model(family), families.model(family)
    symprune.prune(pruned, families.tokens(2), Recipe(method="magnitude"))
    return dense.eval(), pruned.eval()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt", "mixtral"])
def test_the_figures_are_those_of_the_models_own_logits(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, pruned = pair(family)
    windows = families.tokens(3)
    with torch.no_grad():
        sums = [
            compare(dense(row[None]).logits[0, :-1], pruned(row[None]).logits[0, :-1])
            for row in windows
        ]
    expected = summary(sums, windows.shape[1])
    whole = diverge(InMemory(dense), InMemory(pruned), windows, 2)
    monkeypatch.setattr(divergence, "AT_ONCE", 3 * families.VOCABULARY)
    in_parts = diverge(InMemory(dense), InMemory(pruned), windows)
    assert expected.kl > 0
    for found in (whole, in_parts):
        # Sums of some hundred terms in fp32, taken together differently; told to 1e-6.
        assert math.isclose(found.kl, expected.kl, rel_tol=1e-3, abs_tol=2e-6)
        assert found.agreement == expected.agreement and found.windows == 3


def test_a_model_on_disk_is_as_far_as_one_in_memory(folder: Path) -> None:
    _, pruned = pair("llama")
    dense = hub.load_config(hub.resolve(str(folder)))
    streamed = StreamedModel(open_shards(folder), dense)
    windows = families.tokens(3)
    loaded = families.model().eval()
    found = diverge(OnDisk(streamed), InMemory(pruned), windows, at_once=2)
    expected = diverge(InMemory(loaded), InMemory(pruned), windows)
    assert math.isclose(found.kl, expected.kl, rel_tol=1e-4, abs_tol=2e-6)
    assert diverge(OnDisk(streamed), InMemory(loaded), windows).agreement == 1


@pytest.mark.parametrize("values", [None, "int8"])
def test_a_run_records_what_eval_finds_afterwards(
    values: str | None, folder: Path, tmp_path: Path
) -> None:
    recipe = Recipe(method="wanda", values=values, **TEXT)
    job = pruning.Job(str(folder), recipe, tmp_path / "out", eval_windows=3)
    record = pruning.prune(job)
    (entry,) = record["perplexity"]
    found = evaluate(str(tmp_path / "out"), "builtin", 16, 3, against=str(folder))["against"]
    assert entry["divergence"]["windows"] == 3 and found["model"] == str(folder)
    assert math.isclose(entry["divergence"]["kl"], found["kl"], rel_tol=1e-3, abs_tol=2e-6)
    assert entry["divergence"]["agreement"] == found["agreement"]
    kept = json.loads((tmp_path / "out" / "symprune.json").read_text())
    assert kept["perplexity"] == record["perplexity"]
    rows = tables.summary(record).columns[0].cells
    assert {"  KL(dense || pruned), nats a token", "  same likeliest token"} <= set(rows)


def test_the_dense_model_is_no_way_off_itself(folder: Path) -> None:
    found = evaluate(str(folder), "builtin", 16, 2, against=str(folder))["against"]
    assert (found["kl"], found["agreement"]) == (0.0, 1.0)
    assert tables.against(found).title == f"Against {folder}, 2 x 16 tokens"


def test_models_that_read_other_tokens_are_not_compared(folder: Path, tmp_path: Path) -> None:
    families.model().save_pretrained(tmp_path / "other")
    families.tokenizer(begins=True).save_pretrained(tmp_path / "other")
    with pytest.raises(SympruneError, match="other has another tokenizer"):
        evaluate(str(folder), "builtin", 16, 2, against=str(tmp_path / "other"))
    small = families.model()
    small.resize_token_embeddings(families.VOCABULARY - 1)
    with pytest.raises(SympruneError, match="different vocabularies"):
        diverge(InMemory(families.model()), InMemory(small), families.tokens(1))
