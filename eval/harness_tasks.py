"""The tasks of lm-evaluation-harness, found by name and fed from the hub or from local jsonl files.

A local task is the harness's own config (prompt, choices, metrics, preprocessing, includes) with
nothing changed but where its documents come from, so local and hub scores are comparable.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import lm_eval
from lm_eval.api.registry import METRIC_REGISTRY
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from symprune.errors import SympruneError
from symprune.validation import parse_json

Row = dict[str, Any]

_CONFIGS = Path(lm_eval.__path__[0]) / "tasks"
_TASK_LINE = re.compile(r"""^["']?task["']?:[ \t]*["']?([^\s"'#\[]+)["']?[ \t]*(?:#.*)?$""", re.M)
_GLUE_ENTAILMENT = {"entailment": 0, "not_entailment": 1}


@dataclass(frozen=True)
class HarnessTask:
    """A harness task with its documents in place, and where they came from."""

    name: str
    split: str
    source: str
    task: Task


def load_tasks(names: Sequence[str], task_data: Path | None = None) -> list[HarnessTask]:
    """The named tasks, ready to score; a `SympruneError` names the first that cannot be had."""
    wanted = list(dict.fromkeys(names))
    if not wanted:
        raise SympruneError("No task was named; name at least one, such as 'boolq'.")
    if task_data is not None and not task_data.is_dir():
        raise SympruneError(f"The task data directory '{task_data}' does not exist.")
    with quiet():
        configs = _find_configs(wanted)
        if task_data is None:
            return [_from_hub(name, configs[name]) for name in wanted]
        files = {name: _local_file(name, task_data) for name in wanted}
        return [_from_file(name, configs[name], files[name]) for name in wanted]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the harness and the data libraries from writing anything but errors."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    bars_were_on = not datasets.are_progress_bars_disabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars_were_on:
            datasets.enable_progress_bars()


def _find_configs(names: Sequence[str]) -> dict[str, Path]:
    """The installed YAML file of each task."""
    quick = _configs_by_task_line()
    return {name: quick[name] if name in quick else _config_in_index(name) for name in names}


@lru_cache(maxsize=1)
def _configs_by_task_line() -> dict[str, Path]:
    """Task names as plain lines of the YAML files give them.

    `TaskManager()` knows more names but parses all of the harness's 14,000 files to find them,
    which takes many times as long.
    """
    found: dict[str, Path] = {}
    for path in sorted(_CONFIGS.glob("**/*.yaml"), key=Path.as_posix):
        match = _TASK_LINE.search(path.read_text(encoding="utf-8", errors="replace"))
        if match:
            found.setdefault(match[1], path)
    return found


@lru_cache(maxsize=1)
def _full_index() -> TaskManager:
    return TaskManager()


def _config_in_index(name: str) -> Path:
    index = _full_index()
    if name in index.all_subtasks:
        return Path(index.task_index[name].yaml_path)
    if name in index.all_tasks:
        raise SympruneError(f"'{name}' is a group of tasks; name the tasks of the group instead.")
    near = difflib.get_close_matches(name, index.all_subtasks, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    raise SympruneError(f"'{name}' is not a task of the evaluation harness{hint}")


def _from_hub(name: str, config: Path) -> HarnessTask:
    try:
        task = TaskManager(include_defaults=False).load(str(config))["tasks"][name]
    except (ConnectionError, TimeoutError) as error:
        raise SympruneError(
            f"The data of task '{name}' is not on this machine and the HuggingFace hub cannot be "
            f"reached; pass --task-data DIR with a file {name}.jsonl in it."
        ) from error
    except Exception as error:
        raise SympruneError(
            f"The data of task '{name}' cannot be loaded from the HuggingFace hub "
            f"({_first_line(error)}); pass --task-data DIR with a file {name}.jsonl in it."
        ) from error
    split = task.config.test_split or task.config.validation_split or "unknown"
    return _checked(HarnessTask(name, split, task.DATASET_PATH or "unknown", task))


def _local_file(name: str, task_data: Path) -> Path:
    file = task_data / f"{name}.jsonl"
    if not file.is_file():
        raise SympruneError(f"There is no data for task '{name}': '{file}' does not exist.")
    return file


def _from_file(name: str, config_path: Path, file: Path) -> HarnessTask:
    """The harness's task on the rows of a file.

    The file is taken for the validation split, also where the harness would use the test split
    (ARC, OpenBookQA), because that is the split whose answers are public for every task; only a
    task that has no validation split reads it as its test split.
    """
    config = load_yaml(config_path)
    if "class" in config:
        raise SympruneError(f"Task '{name}' is made by a program and cannot read local data.")
    _check_metrics(name, config)
    split = config.get("validation_split") or config.get("test_split") or "validation"
    role = "validation_split" if config.get("validation_split") else "test_split"
    rows = [_like_the_hub(name, row) for row in _read_rows(file)]
    local = {
        **config,
        "dataset_path": str(file),
        "dataset_name": None,
        "dataset_kwargs": None,
        "custom_dataset": _dataset_maker(rows, split),
        "process_docs": _once(config.get("process_docs")),
        # A file holds one split, and zero-shot prompts need no examples from another.
        **dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split")),
        "fewshot_config": {"samples": []},
        role: split,
    }
    try:
        task = TaskManager(include_defaults=False).load(local)["tasks"][name]
    except Exception as error:
        raise SympruneError(
            f"The fields of '{file}' ({', '.join(rows[0])}) do not fit task '{name}', which "
            f"expects those of {config.get('dataset_path')} ({_first_line(error)})."
        ) from error
    return _checked(HarnessTask(name, split, str(file), task))


def _dataset_maker(rows: list[Row], split: str) -> Callable[..., Any]:
    """What the harness calls in place of `datasets.load_dataset`; it leaves no cache files."""

    def documents(**_metadata: Any) -> datasets.DatasetDict:
        return datasets.DatasetDict({split: datasets.Dataset.from_list(rows)})

    return documents


def _once(process: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """Preprocessing that runs once; the harness repeats it each time it looks at the documents."""
    if process is None:
        return None
    processed: list[Any] = []

    def process_once(documents: Any) -> Any:
        if not processed:
            processed.append(process(documents))
        return processed[0]

    return process_once


def _read_rows(file: Path) -> list[Row]:
    rows: list[Row] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise SympruneError(f"Line {number} of '{file}' is not JSON ({error}).") from error
            if not isinstance(row, dict) or (rows and row.keys() != rows[0].keys()):
                raise SympruneError(f"Line {number} of '{file}' has not the fields of line 1.")
            rows.append(row)
    if not rows:
        raise SympruneError(f"The task data file '{file}' is empty.")
    return rows


def _like_the_hub(name: str, row: Row) -> Row:
    """A row as the hub's copy of the data set has it, where the original files differ.

    BoolQ's own files call the label `answer` and both they and SuperGLUE's write it as a truth
    value; GLUE's write RTE's labels as words. The hub's copies have class numbers.
    """
    if name == "boolq":
        label = row.get("label", row.get("answer"))
        return {**row, "label": int(label)} if isinstance(label, bool) else row
    if name == "rte" and row.get("label") in _GLUE_ENTAILMENT:
        return {**row, "label": _GLUE_ENTAILMENT[row["label"]]}
    return row


def _check_metrics(name: str, config: Mapping[str, Any]) -> None:
    """Refuse metrics that the harness would download, since local data means no downloads."""
    if config.get("process_results") is not None:
        return
    for entry in config.get("metric_list") or []:
        metric = entry["metric"]
        if isinstance(metric, str) and (entry.get("hf_evaluate") or metric not in METRIC_REGISTRY):
            raise SympruneError(
                f"Task '{name}' cannot be scored from local data because its metric '{metric}' "
                "has to be downloaded."
            )


def _checked(loaded: HarnessTask) -> HarnessTask:
    if getattr(loaded.task, "UNSAFE_CODE", False) or getattr(loaded.task, "MULTIMODAL", False):
        raise SympruneError(
            f"Task '{loaded.name}' runs generated code or needs images or sound, and only text "
            "tasks are scored here."
        )
    return loaded


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
