"""Harness tasks: the prompts stay the harness's own; what cannot be had is named in a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from symprune.errors import SympruneError
from symprune.eval import harness_tasks
from symprune.eval.zeroshot import THESIS_TASKS, check_tasks

ALL_TASKS = (*THESIS_TASKS, "piqa")
Rows = dict[str, list[dict[str, Any]]]


def _write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class _AsPublished(ConfigurableTask):
    """A harness task with its config untouched; only the download gives the rows at hand."""

    rows: list[dict[str, Any]]

    def download(self, *_: Any, **__: Any) -> None:
        rows = datasets.Dataset.from_list(self.rows)
        self.dataset = dict.fromkeys(("train", "validation", "test"), rows)


def _requests(task: Any, limit: int) -> list[tuple[Any, ...]]:
    task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(0)
    task.build_all_requests(limit=limit)
    return [(*request.args, task.doc_to_target(request.doc)) for request in task.instances]


def _assert_same_requests_as_published(name: str, folder: Path, limit: int) -> None:
    config_path = harness_tasks._find_configs([name])[name]
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    if name == "boolq":
        rows = [{**row, "label": int(row["answer"])} for row in rows]
    published_type = type("Published", (_AsPublished,), {"rows": rows})
    config = {key: value for key, value in load_yaml(config_path).items() if key != "tag"}
    published = published_type(config=config)
    local = harness_tasks.load_tasks([name], folder)[0].task
    assert _requests(local, limit) == _requests(published, limit)
    assert local.aggregation().keys() == published.aggregation().keys()


@pytest.mark.parametrize("name", ALL_TASKS)
def test_local_prompts_choices_and_targets_are_those_of_the_harness(
    name: str, task_data: Path
) -> None:
    _assert_same_requests_as_published(name, task_data, limit=10)


def test_prompts_have_the_published_form(task_data: Path) -> None:
    contexts = {}
    for loaded in harness_tasks.load_tasks(ALL_TASKS, task_data):
        contexts[loaded.name] = _requests(loaded.task, 1)[0][:2]
    assert contexts["boolq"] == ("Ice is frozen water.\nQuestion: is ice water?\nAnswer:", " no")
    assert contexts["hellaswag"] == ("Baking bread: A man kneads dough. He", " bakes it.")
    assert contexts["winogrande"] == (
        "The cup did not fit in the bag as the cup",
        " was too big.",
    )


def test_labels_of_the_original_files_become_the_hubs_class_numbers(
    task_rows: Rows, tmp_path: Path
) -> None:
    original = [{**row, "label": row["answer"]} for row in task_rows["boolq"]]
    _write(tmp_path, "boolq", [{k: v for k, v in row.items() if k != "answer"} for row in original])
    words = ["entailment", "not_entailment"]
    _write(tmp_path, "rte", [{**row, "label": words[row["label"]]} for row in task_rows["rte"]])
    boolq, rte = harness_tasks.load_tasks(["boolq", "rte"], tmp_path)
    assert [boolq.task.doc_to_target(doc) for doc in boolq.task.eval_docs] == [1, 0]
    assert [rte.task.doc_to_target(doc) for doc in rte.task.eval_docs] == [0, 1]


def test_an_unknown_task_is_named_with_the_nearest_known_one(task_data: Path) -> None:
    with pytest.raises(SympruneError, match=r"'hellaswagg' is not a task.*mean 'hellaswag'\?"):
        check_tasks(["piqa", "hellaswagg"], task_data)


def test_a_group_of_tasks_is_refused_by_name(task_data: Path) -> None:
    with pytest.raises(SympruneError, match="'ai2_arc' is a group"):
        check_tasks(["ai2_arc"], task_data)


def test_no_task_at_all_is_refused(task_data: Path) -> None:
    with pytest.raises(SympruneError, match="No task"):
        check_tasks([], task_data)


def test_missing_local_data_is_named(task_data: Path, tmp_path: Path) -> None:
    with pytest.raises(SympruneError, match=r"'sciq': .*sciq\.jsonl' does not exist"):
        check_tasks(["piqa", "sciq"], task_data)
    with pytest.raises(SympruneError, match="nowhere' does not exist"):
        check_tasks(["piqa"], tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is empty"),
        ('{"goal": "a", "sol1"', "Line 1 of .* is not JSON"),
        ('{"goal": "a"}\n\n["goal"]\n', "Line 3 of .* has not the fields"),
        ('{"goal": "a"}\n{"aim": "a"}\n', "Line 2 of .* has not the fields"),
        ('{"aim": "a"}\n', r"fields of .* \(aim\) do not fit task 'piqa'.*baber/piqa"),
    ],
)
def test_a_file_that_does_not_fit_its_task_is_named(
    content: str, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "piqa.jsonl").write_text(content)
    with pytest.raises(SympruneError, match=complaint) as caught:
        check_tasks(["piqa"], tmp_path)
    assert "piqa" in str(caught.value) and "\n" not in str(caught.value)


def test_a_metric_that_would_be_downloaded_is_refused_with_local_data(tmp_path: Path) -> None:
    _write(tmp_path, "kobest_wic", [{"word": "a"}])
    with pytest.raises(SympruneError, match=r"'kobest_wic' cannot be scored from local data.*'f1'"):
        check_tasks(["kobest_wic"], tmp_path)


def test_an_unreachable_hub_is_explained_without_a_model(tmp_path: Path) -> None:
    program = (
        "from symprune.errors import SympruneError\n"
        "from symprune.eval.zeroshot import check_tasks\n"
        "try:\n    check_tasks(['piqa'])\n"
        "except SympruneError as error:\n    print(error)\n"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=offline, capture_output=True, text=True, check=True
    )
    assert "'piqa'" in run.stdout and "--task-data DIR" in run.stdout
    assert "cannot be reached" in run.stdout and run.stdout.count("\n") == 1


def test_a_task_of_the_hub_keeps_the_harnesss_split(task_data: Path, tmp_path: Path) -> None:
    source = harness_tasks._find_configs(["arc_easy"])["arc_easy"]
    files = {split: str(task_data / "arc_easy.jsonl") for split in ("train", "validation", "test")}
    config = tmp_path / "arc_easy.yaml"
    config.write_text(
        f"include: {source}\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {json.dumps({'data_files': files, 'cache_dir': str(tmp_path)})}\n"
    )
    loaded = harness_tasks._from_hub("arc_easy", config)
    assert (loaded.split, loaded.source) == ("test", "json")
    assert len(loaded.task.eval_docs) == 2


@pytest.mark.parametrize("name", ALL_TASKS)
def test_the_published_files_give_the_harnesss_prompts(name: str, published_data: Path) -> None:
    _assert_same_requests_as_published(name, published_data, limit=25)
