"""Models and runs side by side: every figure is the model's own, however it is stored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import families
import pytest
import torch

from symprune import MaskSet, Recipe
from symprune.checkpoint.packed import pack
from symprune.errors import SympruneError
from symprune.jobs import pruning
from symprune.jobs.bench import turns
from symprune.jobs.choosing import speed
from symprune.jobs.choosing.compare import Comparison, compare
from symprune.jobs.choosing.overlap import overlap, overlaps
from symprune.jobs.estimate.forecast import Forecast
from symprune.jobs.evaluate import evaluate
from symprune.machine import memory

PROMPTS = ("lambda if",)
SMALL: dict[str, Any] = {"calibration": "builtin", "nsamples": 2, "seqlen": 16}


@pytest.fixture(scope="module")
def runs(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them packed as well, and the record of one on its own."""
    folder = tmp_path_factory.mktemp("runs")
    for name, recipe in {
        "wanda": Recipe("wanda", **SMALL),
        "magnitude": Recipe("magnitude", sparsity=0.75, **SMALL),
    }.items():
        job = pruning.Job(
            str(tiny_folder), recipe, folder / name, eval_data="builtin", eval_windows=2,
            report_error=True,
        )  # fmt: skip
        pruning.prune(job)
    pack(folder / "wanda", folder / "packed")
    (folder / "alone").mkdir()
    (folder / "alone" / "symprune.json").write_bytes((folder / "wanda/symprune.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def found(runs: Path, tiny_folder: Path) -> dict[str, Any]:
    models = [str(tiny_folder), *(str(runs / n) for n in ("wanda", "magnitude", "packed", "alone"))]
    return compare(Comparison(models, PROMPTS, windows=2, seqlen=32))


def test_what_it_takes_is_told_before_anything_is_measured(runs: Path, tiny_folder: Path) -> None:
    told: list[Forecast | None] = []

    def ask_only(forecast: Forecast | None) -> bool:
        told.append(forecast)
        return False

    models = [str(tiny_folder), str(runs / "packed"), str(runs / "alone")]
    asked = Comparison(models, PROMPTS, windows=2, seqlen=32, speed=True)
    measured: list[tuple[int, int]] = []
    record = compare(asked, tick=lambda *now: measured.append(now), go_on=ask_only)
    assert record == {} and measured == [] and told[0] is not None
    forecast = told[0]
    assert forecast.what == (
        "Comparing 3, perplexity on 2 windows of builtin, 1 prompt continued, speed in 3 rounds"
    )
    steps = {"perplexity", "continuing prompts", "speed", "looking for zeros"}
    assert set(forecast.seconds) == steps and min(forecast.seconds.values()) > 0
    # Every model is in a process of its own while speed is measured.
    assert forecast.memory >= 3 * forecast.held and forecast.disk == 0


def test_each_is_told_for_what_it_is(found: dict[str, Any]) -> None:
    told = {row["label"]: (row["what"], round(row["sparsity"], 4)) for row in found["models"]}
    assert told == {
        "tiny": ("dense", 0.0),
        "wanda": ("pruned", 0.5),
        "magnitude": ("pruned", 0.75),
        "packed": ("packed", 0.5),
        "alone": ("record", 0.5),
    }


def test_perplexities_are_those_of_eval_on_one_text(found: dict[str, Any]) -> None:
    for row in found["models"][:4]:
        alone = evaluate(row["given"], "builtin", 32, 2)
        assert row["perplexity"]["perplexity"] == alone["perplexity"]
    assert "perplexity" not in found["models"][4]


def test_what_a_run_recorded_is_taken_from_its_record(found: dict[str, Any], runs: Path) -> None:
    record = json.loads((runs / "wanda" / "symprune.json").read_text())
    for row in (found["models"][1], found["models"][4]):
        assert row["recorded"] == record["perplexity"]
        errors = [layer["relative_error"] for layer in row["layers"]]
        assert errors == [layer["relative_error"] for layer in record["layers"]]


def test_bytes_and_bits_are_those_of_the_files(found: dict[str, Any], runs: Path) -> None:
    dense, wanda, _, packed, _ = found["models"]
    assert dense["bits_per_weight"] == wanda["bits_per_weight"] == 32
    assert packed["bits_per_weight"] < 32
    assert wanda["weight_bytes"] == (runs / "wanda" / "model.safetensors").stat().st_size


def test_equal_masks_overlap_wholly_and_dense_ones_by_what_is_kept(found: dict[str, Any]) -> None:
    table = found["overlap"]
    assert table[1][3]["share"] == 1.0  # packing keeps the masks
    assert table[0][1]["share"] == pytest.approx(0.5, abs=1e-3) == table[1][0]["share"]
    assert table[0][1]["share"] == pytest.approx(table[0][1]["by_chance"])
    assert table[2][2] is None and table[4][1] is None  # a record alone has no masks


def test_random_masks_overlap_as_chance_has_it() -> None:
    drawn = torch.Generator().manual_seed(0)
    one, other, third = MaskSet(), MaskSet(), MaskSet()
    one["a"] = torch.rand(200, 200, generator=drawn) < 0.5
    other["a"] = torch.rand(200, 200, generator=drawn) < 0.25
    third["b"] = one["a"]
    came = overlap(one, other)
    assert came is not None and came.by_chance == pytest.approx(0.125 / 0.625, abs=0.01)
    assert came.share == pytest.approx(came.by_chance, abs=0.02)
    assert overlap(one, third) is None
    assert overlaps([one, None])[0] == [None, None]


def test_every_model_in_memory_continues_the_prompts(
    found: dict[str, Any], tiny_folder: Path
) -> None:
    (sample,) = found["samples"]
    by = {each["by"]: each["text"] for each in sample["continuations"]}
    assert list(by) == ["tiny", "wanda", "magnitude", "packed"]
    assert by["wanda"] == by["packed"]


def test_a_model_that_is_too_large_is_measured_from_the_disk_and_writes_nothing(
    tiny_folder: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free", lambda device: 1000)
    models = [str(tiny_folder), str(runs / "wanda")]
    record = compare(Comparison(models, PROMPTS, windows=1, seqlen=16))
    assert record["samples"] == []
    assert all(row["perplexity"]["perplexity"] > 1 for row in record["models"])
    assert sum("continued no prompts" in note for note in record["notes"]) == 2


def test_scores_of_an_evaluation_stand_beside_the_model_they_are_of(
    tiny_folder: Path, runs: Path, tmp_path: Path
) -> None:
    result = {"model": str(runs / "wanda"), "zeroshot": {"tasks": {"piqa": {"value": 0.625}}}}
    (tmp_path / "tasks.json").write_text(json.dumps(result))
    models = [str(tiny_folder), str(runs / "wanda"), str(tmp_path / "tasks.json")]
    record = compare(Comparison(models, data=None))
    assert [row.get("tasks") for row in record["models"]] == [None, {"piqa": 0.625}]


def test_models_of_other_tokenizers_are_told_apart(tiny_folder: Path, tmp_path: Path) -> None:
    families.model("smollm", seed=1).save_pretrained(tmp_path / "other")
    tokenizer = families.tokenizer()
    tokenizer.add_tokens(["xyzzy"])
    tokenizer.save_pretrained(tmp_path / "other")
    record = compare(Comparison([str(tiny_folder), str(tmp_path / "other")], data=None))
    assert any("different tokenizers" in note for note in record["notes"])


class Benched:
    """What was asked of a bench."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[turns.Plan] = []
        monkeypatch.setattr(turns, "bench", self.bench)

    def bench(self, given: list[str], plan: turns.Plan, *_: Any, **__: Any) -> dict[str, Any]:
        self.plans.append(plan)
        figures = dict.fromkeys(speed.WANTED, 1.0)
        return {"models": [{"given": name, **figures} for name in given], "notes": ["busy"]}


@pytest.mark.parametrize(
    ("room", "lengths", "said"),
    [
        (2048, (128, 32), []),
        (64, (52, 12), ["Speed was measured on 52 + 12 tokens: wide has room for 64 only."]),
        (8, (6, 2), ["Speed was measured on 6 + 2 tokens: wide has room for 8 only."]),
        (7, None, ["Speed was not measured: wide has room for 7 tokens only."]),
    ],
)
def test_speed_is_measured_on_what_the_shortest_context_has_room_for(
    room: int, lengths: tuple[int, int] | None, said: list[str], tiny_folder: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, positions in (("wide", room), ("wider", 4096)):
        shutil.copytree(tiny_folder, tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["max_position_embeddings"] = positions
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    benched = Benched(monkeypatch)
    models = [str(tmp_path / "wider"), str(tmp_path / "wide")]
    record = compare(Comparison(models, data=None, speed=True))
    assert [(plan.prompt_tokens, plan.new_tokens) for plan in benched.plans] == (
        [lengths] if lengths else []
    )
    assert all(("speed" in row) == bool(lengths) for row in record["models"])
    assert record["notes"] == [*said, *(["busy"] if lengths else [])]


def test_results_alone_have_no_speed(runs: Path) -> None:
    records = [str(runs / name / "symprune.json") for name in ("wanda", "magnitude")]
    record = compare(Comparison(records, speed=True))
    assert record["notes"] == ["Speed was not measured: only results were named, no model."]


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (["{tiny}"], "Name two models or runs or more"),
        (["{tiny}", "{tiny}"], "is named twice"),
        (["{tiny}", "no/where.json"], "There is no file no/where.json"),
        (["{tiny}", "{tiny}/config.json"], "is neither the record of a run nor the result"),
        (["{tiny}", "{tiny}:float8"], "float8"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    models: list[str], said: str, tiny_folder: Path
) -> None:
    given = [each.replace("{tiny}", str(tiny_folder)) for each in models]
    with pytest.raises(SympruneError, match=said):
        compare(Comparison(given, PROMPTS))
