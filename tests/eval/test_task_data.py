"""MMLU and GSM8K from tiny copies of their data sets, and examples in the prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from symprune.errors import SympruneError
from symprune.eval import harness_tasks
from symprune.eval.zeroshot import choose_tasks, evaluate, table

SUBJECTS = harness_tasks.subjects("mmlu")
Row = dict[str, Any]


def mmlu_rows(of_each: int, stem: str) -> list[Row]:
    """As the configuration `all` of cais/mmlu has them."""
    return [
        {
            "question": f"{stem} {number}?",
            "subject": name.removeprefix("mmlu_"),
            "choices": ["one", "two", "three", "four"],
            "answer": number % 4,
        }
        for name in SUBJECTS
        for number in range(of_each + (stem == "Which" and name == "mmlu_virology"))
    ]


def sums(*numbers: int) -> list[Row]:
    """As GSM8K's."""
    return [{"question": f"{n} and 1?", "answer": f"It is {n} + 1.\n#### {n + 1}"} for n in numbers]


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data sets as the hub has them."""
    folder = tmp_path_factory.mktemp("copies")
    for split, rows in (("test", mmlu_rows(1, "Which")), ("dev", mmlu_rows(3, "What"))):
        file = folder / "cais" / "mmlu" / "all" / f"{split}-00000-of-00001.parquet"
        datasets.Dataset.from_list(rows).to_parquet(str(file))
    splits = {"train": sums(5, 6, 7), "test": sums(1, 2)}
    made = {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(folder / "gsm8k" / "main"))
    return folder


def prompts(name: str, folder: Path, shots: int) -> list[str]:
    task = harness_tasks.load_tasks([name], folder, shots)[0].task
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(1234)
    task.build_all_requests()
    return [request.args[0] for request in task.instances]


def test_mmlu_is_one_score_in_which_every_question_counts_the_same(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, copies: Path
) -> None:
    assert len(SUBJECTS) == 57 and choose_tasks("piqa,mmlu") == ["piqa", *SUBJECTS]
    result = evaluate(model, tokenizer, choose_tasks("mmlu"), task_data=copies)
    (score,) = result.scores
    assert (score.task, score.metric, score.samples, score.split) == ("mmlu", "acc", 58, "test")
    assert score.subjects is not None and score.subjects.keys() == set(SUBJECTS)
    hits = sum(score.subjects.values()) + score.subjects["mmlu_virology"]  # has two questions
    assert score.value == pytest.approx(hits / 58)
    assert result.to_json()["tasks"]["mmlu"]["subjects"] == score.subjects
    assert "mmlu" in str(next(iter(table(result).columns)).cells.__next__())


def test_examples_are_the_first_of_mmlus_dev_split(copies: Path) -> None:
    (prompt, *_) = prompts("mmlu_anatomy", copies, 2)
    assert prompt.startswith("The following are multiple choice questions (with answers) about")
    assert "What 0?\nA. one" in prompt and "What 1?" in prompt and "What 2?" not in prompt
    assert prompt.endswith("Which 0?\nA. one\nB. two\nC. three\nD. four\nAnswer:")
    assert "What" not in prompts("mmlu_anatomy", copies, 0)[0]


def test_gsm8k_generates_behind_examples_of_its_train_split(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, copies: Path
) -> None:
    for prompt in prompts("gsm8k", copies, 2):
        assert prompt.count("Question: ") == 3 and prompt.count("#### ") == 2
        assert prompt.endswith("and 1?\nAnswer:")
    result = evaluate(model, tokenizer, ["gsm8k"], task_data=copies, num_fewshot=2, limit=1)
    (score,) = result.scores
    assert (score.metric, score.samples, score.split) == ("exact_match", 1, "test")
    assert result.to_json()["num_fewshot"] == 2 and table(result).title.startswith("2-shot")


def test_files_of_lines_do_as_well(tmp_path: Path) -> None:
    files = {"mmlu": mmlu_rows(1, "Which"), "mmlu.dev": mmlu_rows(3, "What")}
    files |= {"gsm8k": sums(1), "gsm8k.train": sums(5, 6)}
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert "What 1?" in prompts("mmlu_virology", tmp_path, 2)[0]
    assert len(harness_tasks.load_tasks(["mmlu_virology"], tmp_path)[0].task.eval_docs) == 2
    assert prompts("gsm8k", tmp_path, 1)[0].count("#### ") == 1


def test_data_that_is_not_there_is_named(copies: Path, tmp_path: Path) -> None:
    with pytest.raises(SympruneError, match=r"no data for task 'mmlu_abstract_algebra'.*cais/mmlu"):
        harness_tasks.load_tasks(SUBJECTS, tmp_path)
    with pytest.raises(SympruneError, match=r"than that, and there are 3; .*gsm8k/main"):
        harness_tasks.load_tasks(["gsm8k"], copies, 3)
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(sums(1)[0]))
    with pytest.raises(SympruneError, match=r"there are none; .*gsm8k\.train\.jsonl"):
        harness_tasks.load_tasks(["gsm8k"], tmp_path, 5)
    broken = tmp_path / "gsm8k" / "main" / "train.parquet"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"not parquet")
    with pytest.raises(SympruneError, match="cannot be read"):
        harness_tasks.load_tasks(["gsm8k"], tmp_path, 5)
