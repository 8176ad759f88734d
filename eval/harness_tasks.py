"""The tasks of lm-evaluation-harness, found by name and fed from the hub or from a folder.

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
from symprune.eval import task_data

EXAMPLES = "examples"  # the split of those that go into prompts
_CONFIGS = Path(lm_eval.__path__[0]) / "tasks"
_TASK_LINE = re.compile(r"""^["']?task["']?:[ \t]*["']?([^\s"'#\[]+)["']?[ \t]*(?:#.*)?$""", re.M)


@dataclass(frozen=True)
class HarnessTask:
    """A harness task with its documents in place, and where they came from."""

    name: str
    split: str
    source: str
    task: Task


def load_tasks(
    names: Sequence[str], folder: Path | None = None, shots: int = 0
) -> list[HarnessTask]:
    """The named tasks, ready to score with so many examples in the prompt, from a folder or the
    hub; a `SympruneError` names the first that cannot be had."""
    wanted = list(dict.fromkeys(names))
    if not wanted:
        raise SympruneError("No task was named; name at least one, such as 'boolq'.")
    if folder is not None and not folder.is_dir():
        raise SympruneError(f"The task data directory '{folder}' does not exist.")
    with quiet():
        configs = _find_configs(wanted)
        if folder is None:
            return [_from_hub(name, configs[name]) for name in wanted]
        return [_from_folder(name, configs[name], folder, shots) for name in wanted]


def subjects(group: str) -> tuple[str, ...]:
    """The tasks of MMLU, one for every subject, in order."""
    folder = _CONFIGS / group / "default"
    return tuple(
        name
        for name, path in sorted(_configs_by_task_line().items())
        if path.parent == folder and name.startswith(f"{group}_")
    )


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
            f"reached; pass --task-data DIR with a file {name}.jsonl or a copy of the data set in "
            "it."
        ) from error
    except Exception as error:
        raise SympruneError(
            f"The data of task '{name}' cannot be loaded from the HuggingFace hub "
            f"({_first_line(error)}); pass --task-data DIR with a file {name}.jsonl in it."
        ) from error
    split = task.config.test_split or task.config.validation_split or "unknown"
    return _checked(HarnessTask(name, split, task.DATASET_PATH or "unknown", task))


def _from_folder(name: str, config_path: Path, folder: Path, shots: int) -> HarnessTask:
    """The harness's task on documents of a folder."""
    config = load_yaml(config_path)
    if "class" in config:
        raise SympruneError(f"Task '{name}' is made by a program and cannot read local data.")
    _check_metrics(name, config)
    own = dict(config.get("fewshot_config") or {})
    found = task_data.find(name, config, folder, 0 if "samples" in own else shots)
    role = "validation_split" if config.get("validation_split") else "test_split"
    splits = {found.split: found.rows, **({EXAMPLES: found.examples} if found.examples else {})}
    if found.examples:
        examples = {"fewshot_split": EXAMPLES, "fewshot_config": {**own, "split": EXAMPLES}}
    else:  # those the task comes with, if they are asked for
        examples = {"fewshot_config": own if shots else {"samples": []}}
    local = {
        **config,
        "dataset_path": str(found.source),
        "dataset_name": None,
        "dataset_kwargs": None,
        "custom_dataset": _dataset_maker(splits),
        "process_docs": _once(config.get("process_docs")),
        **dict.fromkeys(("training_split", "validation_split", "test_split", "fewshot_split")),
        **examples,
        role: found.split,
    }
    try:
        task = TaskManager(include_defaults=False).load(local)["tasks"][name]
    except Exception as error:
        raise SympruneError(
            f"The fields of '{found.source}' ({', '.join(found.rows[0])}) do not fit task "
            f"'{name}', which expects those of {config.get('dataset_path')} ({_first_line(error)})."
        ) from error
    return _checked(HarnessTask(name, found.split, str(found.source), task))


def _dataset_maker(splits: Mapping[str, list[task_data.Row]]) -> Callable[..., Any]:
    """What the harness calls in place of `datasets.load_dataset`; it leaves no cache files."""

    def documents(**_metadata: Any) -> datasets.DatasetDict:
        made = {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}
        return datasets.DatasetDict(made)

    return documents


def _once(process: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
    """Preprocessing that runs once for a split; the harness repeats it whenever it looks at one."""
    if process is None:
        return None
    processed: dict[int, tuple[Any, Any]] = {}  # a split is kept, so that its id stays its own

    def process_once(documents: Any) -> Any:
        if id(documents) not in processed:
            processed[id(documents)] = documents, process(documents)
        return processed[id(documents)][1]

    return process_once


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
