"""Models side by side: turns, medians, and what a process of its own answers."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from torch import nn

from symprune import Recipe
from symprune.errors import SympruneError
from symprune.jobs import pruning
from symprune.jobs.bench import turns, worker
from symprune.jobs.bench.process import bench_process
from symprune.jobs.bench.turns import Plan, read_contender, summarise, take_turns, warm_up
from symprune.jobs.evaluate import evaluate
from symprune.jobs.measures import bits_per_weight
from symprune.models.hub import Access, split_dtype
from symprune.runtime.pack_model import pack_model

SMALL = Plan(prompt_tokens=12, new_tokens=4, rounds=1, threads=1, windows=3, seqlen=32)
FIGURE = "decode_tokens_per_second"


class Scripted:
    """A worker whose turns are written down, and who writes down when it had them."""

    def __init__(self, name: str, speeds: list[float], diary: list[str]) -> None:
        self.name, self.speeds, self.diary = name, iter(speeds), diary

    def ask(self, do: str, tick: Any = None, **about: Any) -> dict[str, Any]:
        assert do == "turn"
        self.diary.append(self.name)
        return turn(next(self.speeds))


def turn(decode: float) -> dict[str, float]:
    return {**dict.fromkeys(turns.FIGURES, 1.0), FIGURE: decode}


def test_models_take_turns_and_the_first_round_is_not_counted() -> None:
    diary: list[str] = []
    seen: list[tuple[int, int, str]] = []
    workers = [Scripted("a", [9, 1, 2], diary), Scripted("b", [9, 3, 4], diary)]
    first, seconds = warm_up(workers, 2, lambda *now: seen.append(now), iter([5.0, 8.0]).__next__)
    assert [t[FIGURE] for t in first] == [9, 9] and seconds == 3
    turns = take_turns(workers, 2, lambda *now: seen.append(now))
    assert diary == ["a", "b"] * 3
    assert [[t[FIGURE] for t in mine] for mine in turns] == [[1, 2], [3, 4]]
    assert seen[0] == (1, 6, "warming up") and seen[-1] == (6, 6, "round 2 of 2")


def test_the_round_to_warm_up_tells_what_the_others_take() -> None:
    plan = Plan(prompt_tokens=12, new_tokens=4, rounds=5, windows=10, seqlen=100, device="cpu")
    figures = [
        {"prefill_tokens_per_second": 500.0, "process_bytes": 1e9},
        {"prefill_tokens_per_second": 250.0, "process_bytes": 2e9},
    ]
    found = turns.forecast(plan, 2, figures, seconds=3.0, spent=7.0)
    assert found.seconds == {"rounds": 15.0, "perplexity": 2.0 + 4.0} and found.total == 28
    assert found.memory == 3e9 and found.what.startswith("2 models in 5 rounds of 12 + 4 tokens")
    assert found.where == "on cpu (as asked for), 2 threads each"
    assert set(turns.forecast(replace(plan, data=None), 1, figures, 1, 0).seconds) == {"rounds"}


def test_figures_are_medians_and_ratios_are_taken_within_a_round() -> None:
    # The second round met other work; the ratio of that round tells the same as the others.
    first, second = [turn(10), turn(2), turn(11)], [turn(20), turn(4), turn(33)]
    found = summarise(second, first)
    assert found[FIGURE] == 20 and found["decode_times_first"] == 2
    assert [t[FIGURE] for t in found["turns"]] == [20, 4, 33]
    assert summarise(first, first)["decode_times_first"] == 1


class Spoken:
    """A runner whose every step takes a known time on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def encode(self, text: str) -> list[int]:
        self.now += 0.25
        return list(range(len(text)))

    def generate(self, prompt: list[int], count: int, came: Callable[[], None]) -> None:
        self.now += 0.5 * len(prompt)
        for number in range(count):
            self.now += 2.0 if number else 0.0
            came()

    def memory(self) -> int:
        return 1000

    def finish(self, **_: Any) -> dict[str, Any]:
        return {}


def test_a_turn_tells_reading_from_waiting_from_writing() -> None:
    runner = Spoken()
    about = {"prompt": "a text of words", "prompt_tokens": 4, "new_tokens": 6}
    found = worker.Bench(runner, 300, about, runner.clock).take_turn()
    assert found["prefill_tokens_per_second"] == 4 / 2.0
    assert found["first_token_seconds"] == 0.25 + 2.0
    assert found["decode_tokens_per_second"] == 5 / 10.0
    assert (found["memory_bytes"], found["process_bytes"]) == (700, 1000)


def test_a_prompt_longer_than_the_text_is_refused() -> None:
    about = {"prompt": "short", "prompt_tokens": 9, "new_tokens": 2}
    with pytest.raises(SympruneError, match="5 tokens, too few"):
        worker.Bench(Spoken(), 0, about, lambda: 0.0)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("smollm2-135m:bfloat16", ("smollm2-135m", "bfloat16")),
        ("owner/name", ("owner/name", "auto")),
        ("./a:folder", ("./a:folder", "auto")),
        ("./a:folder:float32", ("./a:folder", "float32")),
        (":float32", (":float32", "auto")),
    ],
)
def test_a_model_may_name_its_type(given: str, found: tuple[str, str]) -> None:
    assert split_dtype(given, "auto") == found


def test_a_gguf_file_without_a_type_is_for_llama_cpp_where_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    there: dict[str, object] = {"llama_cpp": object()}
    monkeypatch.setattr(importlib.util, "find_spec", there.get)
    assert read_contender(str(file), "auto", Access()).engine == "llama.cpp"
    assert read_contender(f"{file}:bfloat16", "auto", Access()).engine == "PyTorch"
    assert read_contender(str(file), "float32", Access()).engine == "PyTorch"
    there.clear()
    assert read_contender(str(file), "auto", Access()).engine == "PyTorch"


def test_bits_are_those_of_the_blocks_with_all_that_belongs_to_them() -> None:
    model = families.model("smollm")
    bits = bits_per_weight(model)
    weights = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    assert (bits.bits, bits.weights, bits.packed) == (32 * weights, weights, ())
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            module.weight.data[:, ::2] = 0
    pack_model(model)
    packed = bits_per_weight(model)
    blobs = [p for n, p in model.named_parameters() if n.endswith(".packed")]
    assert packed.packed == ("float32",) and packed.weights == weights
    assert packed.bits == 8 * sum(blob.numel() for blob in blobs)


def test_bits_of_a_model_with_transposed_weights_are_counted_as_well() -> None:
    model = families.model("gpt2").to(torch.bfloat16)
    bits = bits_per_weight(model)
    assert bits.bits == 16 * bits.weights > 0


@pytest.fixture(scope="module")
def record(tiny_folder: Path) -> dict[str, Any]:
    """A bench of a model in two types, each in a process of its own."""
    return turns.bench([str(tiny_folder), f"{tiny_folder}:bfloat16"], SMALL)


def test_a_bench_measures_every_model(record: dict[str, Any], tiny_folder: Path) -> None:
    assert record["kind"] == "bench" and record["plan"]["threads"] == 1
    assert [row["label"] for row in record["models"]] == ["tiny", "tiny"]
    assert [row["dtype"] for row in record["models"]] == ["float32", "bfloat16"]
    assert [row["bits_per_weight"] for row in record["models"]] == [32, 16]
    size = sum(path.stat().st_size for path in tiny_folder.iterdir())
    for row in record["models"]:
        assert row["engine"] == "PyTorch" and not row["packed"] and row["file_bytes"] == size
        assert len(row["turns"]) == 1 and all(row[name] > 0 for name in turns.FIGURES)
    assert json.loads(json.dumps(record)) == record


def test_its_perplexity_is_that_of_eval(record: dict[str, Any], tiny_folder: Path) -> None:
    told = evaluate(str(tiny_folder), "builtin", 32, 3)
    found = record["models"][0]["perplexity"]
    assert (found["windows"], found["seqlen"], found["data"]) == (3, 32, "builtin")
    assert found["perplexity"] == pytest.approx(told["perplexity"], rel=1e-6)
    assert found["tokens"] == record["models"][1]["perplexity"]["tokens"]


def test_a_packed_model_takes_part_packed(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(method="magnitude", values={"name": "int4", "solve": "nearest"})
    packed = tmp_path / "packed"
    pruning.prune(pruning.Job(str(tiny_folder), recipe, packed, evaluate=False))
    dense, ours = turns.bench([str(tiny_folder), str(packed)], SMALL)["models"]
    assert (dense["packed"], ours["packed"]) == ([], ["int4"])
    assert ours["bits_per_weight"] < 8 and ours["file_bytes"] < dense["file_bytes"]
    told = evaluate(str(packed), "builtin", 32, 3)
    # Fused kernels round inputs to 8 bits: 1 in 250 of their largest, on a model that knows little.
    assert ours["perplexity"]["perplexity"] == pytest.approx(told["perplexity"], rel=0.01)


def test_perplexity_is_left_out_when_it_is_not_wanted(tiny_folder: Path) -> None:
    plan = Plan(12, 4, 1, 1, data=None)
    (row,) = turns.bench([str(tiny_folder)], plan)["models"]
    assert "perplexity" not in row and row["decode_times_first"] == 1


def test_what_no_model_can_do_is_said_before_any_is_loaded(tiny_folder: Path) -> None:
    with pytest.raises(SympruneError, match="named twice"):
        turns.bench([str(tiny_folder)] * 2, SMALL)
    with pytest.raises(SympruneError, match=r"no-such\.txt"):
        turns.bench([str(tiny_folder)], Plan(data="no-such.txt"))
    with pytest.raises(SympruneError, match="Device 'gpu0'"):
        turns.bench([str(tiny_folder)], Plan(device="gpu0"))
    with pytest.raises(SympruneError, match="no model folder"):
        turns.bench([str(tiny_folder), "./none"], SMALL)


def test_what_a_process_cannot_do_comes_as_its_sentence(tiny_folder: Path) -> None:
    with pytest.raises(SympruneError, match="room for 64 tokens"):
        turns.bench([str(tiny_folder)], Plan(prompt_tokens=63, new_tokens=2, data=None))


def test_a_process_that_is_gone_is_said() -> None:
    with bench_process("x", 1) as worker:
        os.kill(worker._process.pid, signal.SIGKILL)
        worker._process.wait()
        with pytest.raises(SympruneError, match=r"measures x failed at 'turn': .*signal 9"):
            worker.ask("turn")


def test_a_process_that_breaks_tells_why() -> None:
    said = "measures x failed at 'load': KeyError: 'engine'"
    with bench_process("x", 1) as worker, pytest.raises(SympruneError, match=said):
        worker.ask("load")


def test_processes_end_with_the_bench() -> None:
    with bench_process("x", 1) as worker:
        process = worker._process
        assert process.poll() is None
    assert process.poll() == 0


def test_models_with_different_tokenizers_are_told_apart() -> None:
    rows: list[dict[str, Any]] = [{"perplexity": {"tokens": n}, "notes": ["n"]} for n in ("1", "2")]
    notes = turns._notes(rows, [], 0.0)
    assert "different tokenizers" in notes[0] and notes[1:] == ["n"]
    assert turns._notes(rows[:1], [], 0.0) == ["n"]
    assert "Other work kept 1.5 cores busy" in turns._notes([], [], 1.5)[0]


def test_threads_are_those_asked_for_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert turns.default_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert 1 <= turns.default_threads() <= (os.cpu_count() or 1)


def test_the_process_imports_no_library_before_it_knows_its_engine() -> None:
    code = (
        "import sys, symprune.jobs.bench.worker;"
        "print(*(name for name in ('torch', 'transformers', 'numpy') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_answers_stand_alone_whatever_is_printed(tmp_path: Path) -> None:
    def lines() -> Iterator[str]:
        yield json.dumps({"do": "load", "engine": "PyTorch", "name": str(tmp_path), "access": {}})

    answers: list[dict[str, Any]] = []
    worker.serve(lines(), answers.append)
    (answer,) = answers
    assert answer["error"].endswith("it has no config.json.")
