"""A recipe is found by trying: within the wish, the best of what was tried, and never twice."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from symprune.checkpoint.packed import pack
from symprune.checkpoint.packed_shards import open_shards
from symprune.checkpoint.streamed_model import StreamedModel
from symprune.cli import main
from symprune.errors import SympruneError
from symprune.eval import recommendation
from symprune.jobs import pruning, sizes
from symprune.jobs.choosing.choices import (
    AMOUNTS,
    KINDS,
    Choice,
    Ladder,
    Weights,
    most_trials,
    pick,
    read_loss,
    read_size,
    small_enough,
)
from symprune.jobs.choosing.recommend import Wish, recommend
from symprune.jobs.estimate.forecast import Forecast
from symprune.machine import memory

WEIGHTS = Weights(inside=1000, around=100, bits=16)
SMALL: dict[str, Any] = {"nsamples": 2, "seqlen": 16, "eval_windows": 2}
SHARED = {"calibration": "builtin", "nsamples": 2, "seqlen": 64}


@pytest.mark.parametrize(
    ("sparsity", "values"),
    [(0.5, None), (0.0, "int8"), (0.7, "int8"), (0.5, "int4"), (0.5, "int3")],
)
def test_the_size_that_is_told_is_that_of_the_packed_model(
    sparsity: float, values: str | None, tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=families.VOCABULARY, hidden_size=256, intermediate_size=512,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "dense")
    families.tokenizer().save_pretrained(tmp_path / "dense")
    choice = Choice("fast", sparsity, values)
    recipe = choice.build(SHARED)
    job = pruning.Job(str(tmp_path / "dense"), recipe, tmp_path / "out", evaluate=False)
    bits = pruning.prune(job)["bits_per_weight"]
    if values is None:
        pack(tmp_path / "out", tmp_path / "packed")
        shards = open_shards(tmp_path / "packed")
        bits = sizes.bits_per_weight(StreamedModel(shards, config), shards)
    assert choice.bits(Weights(1, 0, 16)) == pytest.approx(bits, rel=0.02)


def test_what_is_small_enough_is_the_least_that_goes() -> None:
    for choice in small_enough(WEIGHTS, 0.6 * WEIGHTS.dense_bytes):
        assert choice.bytes(WEIGHTS) <= 0.6 * WEIGHTS.dense_bytes
        if choice.sparsity > 0:
            before = AMOUNTS[AMOUNTS.index(choice.sparsity) - 1]
            less = Choice(choice.recipe, before, choice.values)
            assert less.bytes(WEIGHTS) > 0.6 * WEIGHTS.dense_bytes
    assert small_enough(WEIGHTS, 1) == []


def test_values_are_no_narrower_than_what_all_weights_can_be_kept_in() -> None:
    for share, narrowest in ((0.6, "int8"), (0.4, "int4"), (0.3, "int3"), (0.22, "int3")):
        found = small_enough(WEIGHTS, share * WEIGHTS.dense_bytes)
        assert found[-1].values == narrowest and (found[-1].sparsity == 0) is (share > 0.25)
        assert all(choice.sparsity > 0 for choice in found[:-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [-0.1, 0.0, 0.15, 0.4, 0.9])
def test_a_ladder_finds_the_highest_rung_that_is_good(kind: str | None, limit: float) -> None:
    ladder, tried = Ladder(kind), []
    while (choice := ladder.next()) is not None:
        assert choice not in tried
        tried.append(choice)
        ladder.hear(choice, choice.sparsity <= limit)
    assert len(tried) <= most_trials([Ladder(kind)])
    good = [rung for rung in Ladder(kind).rungs if rung.sparsity <= limit]
    found = [choice for choice in tried if choice.sparsity <= limit]
    assert max((c.sparsity for c in found), default=None) == max(
        (rung.sparsity for rung in good), default=None
    )
    if kind is not None and limit < 0:
        assert [choice.sparsity for choice in tried] == [0]


def test_the_pick_is_the_best_within_the_wish() -> None:
    tried = [
        {"bytes": 50, "perplexity": 40.0},
        {"bytes": 60, "perplexity": 30.0},
        {"bytes": 70, "perplexity": 20.0},
    ]
    assert pick(tried, 65, None) == tried[1]
    assert pick(tried, None, 35.0) == tried[1]
    assert pick(tried, 10, None) is None and pick(tried, None, 10.0) is None


def test_percentages_are_read() -> None:
    assert read_size("60%") == 0.6 and read_size(" 62.5 %") == 0.625
    assert read_loss("+10%") == read_loss("10%") == 0.1


@pytest.mark.parametrize(
    ("read", "text"),
    [(read_size, t) for t in ("60", "0%", "100%", "nan%", "x%", "60%%", "")]
    + [(read_loss, t) for t in ("10", "-5%", "inf%", "+0%")],
)
def test_what_is_no_percentage_is_refused(read: Callable[[str], float], text: str) -> None:
    with pytest.raises(SympruneError, match=r"--size|--perplexity"):
        read(text)


@pytest.fixture(scope="module")
def found(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    wish = Wish(
        str(tiny_folder), size=0.7, results=tmp_path_factory.mktemp("tried") / "r.jsonl", **SMALL
    )
    told: list[tuple[bool, Forecast]] = []

    def go_on(forecast: Forecast | None) -> bool:
        assert forecast is not None
        told.append((wish.file.exists(), forecast))
        return True

    return {**recommend(wish, go_on=go_on), "told": told}


def test_what_it_takes_is_said_before_anything_is_tried(found: dict[str, Any]) -> None:
    ((begun, forecast),) = found["told"]
    count = len(found["tried"])
    assert not begun and forecast.what.startswith(f"At most {count} tries on 2 x 16 tokens")
    assert min(forecast.seconds["masking"], forecast.total, forecast.memory) > 0
    assert forecast.where.startswith("on ") and "found)" in forecast.where


def test_as_many_tries_are_foreseen_as_a_perplexity_may_take(
    tiny_folder: Path, tmp_path: Path
) -> None:
    told: list[Forecast | None] = []

    def ask_only(forecast: Forecast | None) -> bool:
        told.append(forecast)
        return False

    wish = Wish(str(tiny_folder), loss=0.02, results=tmp_path / "r.jsonl", **SMALL)
    assert recommend(wish, go_on=ask_only) == {}
    most = most_trials(Ladder(kind) for kind in KINDS)
    assert told[0] is not None and told[0].what.startswith(f"At most {most} tries")
    assert not wish.file.exists()


def test_the_recommended_is_the_best_that_is_small_enough(found: dict[str, Any]) -> None:
    most = 0.7 * found["dense_bytes"]
    assert all(each["bytes"] <= most for each in found["tried"])
    best = min(each["perplexity"] for each in found["tried"])
    assert found["recommended"]["perplexity"] == best
    assert "For 70 % of the size: " in recommendation.verdict(found)


def test_the_command_does_what_was_tried(
    found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(found["recommended"]["command"])
    assert program == "symprune"
    result = CliRunner().invoke(
        main.app, [*arguments, "-o", "out", "--no-eval", "--no-samples"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out" / "symprune.json").read_text())
    assert record["recipe"] == found["recommended"]["recipe"]


def test_what_was_tried_is_not_tried_again(found: dict[str, Any], tiny_folder: Path) -> None:
    kept = Path(found["results"]).read_bytes()
    assert len(kept.splitlines()) == len(found["tried"])
    said: list[str] = []
    wish = Wish(str(tiny_folder), size=0.7, results=Path(found["results"]), **SMALL)
    again = recommend(wish, said.append)
    assert again["tried"] == found["tried"] and Path(found["results"]).read_bytes() == kept
    assert f"All is in {found['results']} already." in said


def test_a_perplexity_is_reached_with_as_little_as_can_be(
    tiny_folder: Path, tmp_path: Path
) -> None:
    wish = Wish(str(tiny_folder), loss=0.02, results=tmp_path / "r.jsonl", **SMALL)
    record = recommend(wish)
    good = [e for e in record["tried"] if e["perplexity"] <= 1.02 * record["dense"]]
    assert record["recommended"]["bytes"] == min(each["bytes"] for each in good)
    assert len(record["tried"]) <= most_trials(Ladder(kind) for kind in KINDS)


def test_wishes_that_cannot_be_are_refused(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"results": tmp_path / "r.jsonl", **SMALL}
    with pytest.raises(SympruneError, match="one of them"):
        recommend(Wish(str(tiny_folder), **where))
    with pytest.raises(SympruneError, match=r"No recipe makes .* as small as 1 %"):
        recommend(Wish(str(tiny_folder), size=0.01, **where))
    monkeypatch.setattr(memory, "free", lambda device: 1000)
    with pytest.raises(SympruneError, match="tried on a model in memory"):
        recommend(Wish(str(tiny_folder), size=0.5, **where))
    assert list(tmp_path.iterdir()) == []
