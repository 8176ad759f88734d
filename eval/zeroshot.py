"""Tasks through lm-evaluation-harness: zero-shot accuracy as in the thesis's Table 6.6, or with
examples in the prompt.

Like Wanda's Table 2, that table reports plain accuracy (`acc`), not the length-normalised
`acc_norm`; here `acc` is the metric that counts and `acc_norm` is carried beside it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval
import torch
from rich.table import Table

from symprune.errors import SympruneError
from symprune.eval.harness_tasks import HarnessTask, load_tasks, quiet, subjects

if TYPE_CHECKING:
    from symprune.eval.harness_model import Foresee

THESIS_TASKS = (
    "boolq",
    "rte",
    "hellaswag",
    "winogrande",
    "arc_easy",
    "arc_challenge",
    "openbookqa",
)
DEFAULT_TASKS = (
    "hellaswag",
    "winogrande",
    "piqa",
    "arc_easy",
    "arc_challenge",
    "boolq",
    "openbookqa",
)
"""The thesis's, but for RTE, whose 277 questions have a standard error of 3 points, PIQA."""
SETS = {"default": DEFAULT_TASKS, "thesis": THESIS_TASKS}
MMLU = "mmlu"
EXAMPLES_SEED = 1234  # lm-eval's own, of the examples that go into prompts


def choose_tasks(names: str) -> list[str]:
    """The tasks of a list with commas, in which a set of tasks has a name too."""
    given = (name.strip() for name in names.split(","))
    sets = {**SETS, **({MMLU: subjects(MMLU)} if MMLU in names else {})}
    found = (task for name in given if name for task in sets.get(name, (name,)))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class TaskScore:
    """One task's score: `metric` is `acc` where the task has it, else the task's first metric."""

    task: str
    metric: str
    value: float
    stderr: float | None
    acc_norm: float | None
    acc_norm_stderr: float | None
    samples: int
    split: str
    source: str
    subjects: dict[str, float] | None = None  # of a score that is put together from several


@dataclass(frozen=True)
class ZeroShotResult:
    """Scores in the order the tasks were named; `limit` is set when only a part was scored."""

    scores: tuple[TaskScore, ...]
    limit: int | None
    shots: int = 0

    @property
    def mean(self) -> float | None:
        """Mean over the tasks, each counting once; none when their metrics differ."""
        if len({score.metric for score in self.scores}) != 1:
            return None
        return sum(score.value for score in self.scores) / len(self.scores)

    @property
    def mean_stderr(self) -> float | None:
        """Standard error of `mean`, the tasks' errors being independent."""
        errors = [score.stderr for score in self.scores if score.stderr is not None]
        if self.mean is None or len(errors) != len(self.scores):
            return None
        return math.hypot(*errors) / len(errors)

    def to_json(self) -> dict[str, Any]:
        return {
            "tasks": {score.task: asdict(score) for score in self.scores},
            "mean": self.mean,
            "mean_stderr": self.mean_stderr,
            "num_fewshot": self.shots,
            "limit": self.limit,
            "lm_eval_version": lm_eval.__version__,
        }


def check_tasks(tasks: Sequence[str], task_data: Path | None = None, num_fewshot: int = 0) -> None:
    """Raise a `SympruneError` that names the first task that is unknown or has no data.

    Needs no model; without `task_data` it downloads what the hub has and the cache has not.
    """
    load_tasks(tasks, task_data, num_fewshot)


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str] = THESIS_TASKS,
    *,
    task_data: Path | None = None,
    limit: int | None = None,
    num_fewshot: int = 0,
    batch_size: int | str = "auto",
    device: str | torch.device | None = None,
    foresee: Foresee | None = None,
) -> ZeroShotResult:
    """Score a causal language model on harness tasks.

    Args:
        task_data: a folder of TASK.jsonl files with the fields of the HuggingFace data sets, or
            with copies of these; with it nothing is downloaded.
        num_fewshot: examples with answers in the prompt.
        limit: score only the first `limit` documents of each task.
        batch_size: requests per forward pass, or "auto".
        device: where to run; by default where the model is.
        foresee: told of the requests of each kind and of the seconds they take; where it returns
            False they are not made, and the scores mean nothing.
    """
    if limit is not None and limit < 1:
        raise SympruneError(f"The limit on documents per task must be at least 1, not {limit}.")
    batch_size = _batch_size(batch_size)
    loaded = load_tasks(tasks, task_data, num_fewshot)
    if device is not None:
        model.to(device)
    scores = _score(model, tokenizer, loaded, limit, num_fewshot, batch_size, foresee)
    return ZeroShotResult(tuple(_put_together(scores)), limit, num_fewshot)


def _put_together(scores: list[TaskScore]) -> list[TaskScore]:
    """MMLU as one score where all its subjects are: every question counts the same."""
    names = set(subjects(MMLU)) if any(s.task.startswith(MMLU) for s in scores) else set()
    parts = [score for score in scores if score.task in names]
    if len(parts) < max(len(names), 1):
        return scores
    total = sum(score.samples for score in parts)
    value = sum(score.value * score.samples for score in parts) / total
    errors = [(score.stderr or 0.0) * score.samples for score in parts]
    known = all(score.stderr is not None for score in parts)
    whole = replace(
        parts[0], task=MMLU, value=value, samples=total,
        stderr=math.hypot(*errors) / total if known else None,
        subjects={score.task: score.value for score in parts},
    )  # fmt: skip
    first = parts[0]
    return [whole if s is first else s for s in scores if s is first or s.task not in names]


def _batch_size(asked: int | str) -> int | str:
    if asked == "auto":
        return asked
    if not str(asked).isdecimal() or int(asked) < 1:
        raise SympruneError(f"The batch size must be 'auto' or a positive number, not '{asked}'.")
    return int(asked)


def _score(
    model: Any,
    tokenizer: Any,
    loaded: Sequence[HarnessTask],
    limit: int | None,
    shots: int,
    batch_size: int | str,
    foresee: Foresee | None,
) -> list[TaskScore]:
    """Run all tasks in one pass over their requests.

    `lm_eval.evaluate` rather than `simple_evaluate`: the latter reseeds the process's random
    generators and lists every installed package, which takes longer than a small evaluation.
    """
    # Imported late: this brings in transformers, which checking task names does not need.
    from symprune.eval.harness_model import HarnessModel

    for item in loaded:
        item.task.set_config("num_fewshot", shots)
        item.task.set_fewshot_seed(EXAMPLES_SEED)
    try:
        with quiet():
            harness_model = HarnessModel(model, tokenizer, batch_size, foresee)
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                results = lm_eval.evaluate(
                    lm=harness_model,
                    task_dict={"tasks": {item.name: item.task for item in loaded}, "groups": {}},
                    limit=limit,
                    log_samples=False,
                )
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise SympruneError(
            f"A batch of size {batch_size} does not fit in memory; choose a smaller batch size."
        ) from error
    return [
        _task_score(item, results["results"][item.name], results["n-samples"][item.name])
        for item in loaded
    ]


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "can't allocate memory" in str(error) or "not enough memory" in str(error)


def _task_score(
    item: HarnessTask, results: Mapping[str, Any], counts: Mapping[str, int]
) -> TaskScore:
    values: dict[str, float] = {}
    for key, value in results.items():
        name, comma, _filter = key.partition(",")
        if comma and isinstance(value, int | float):
            values.setdefault(name, float(value))
    metric = next(iter(values)) if "acc" not in values else "acc"
    return TaskScore(
        task=item.name,
        metric=metric,
        value=values[metric],
        stderr=values.get(f"{metric}_stderr"),
        acc_norm=values.get("acc_norm"),
        acc_norm_stderr=values.get("acc_norm_stderr"),
        samples=counts["effective"],
        split=item.split,
        source=item.source,
    )


def table(result: ZeroShotResult) -> Table:
    """The scores as a table with their standard errors and, below, the mean."""
    title = f"{result.shots}-shot" if result.shots else "Zero-shot"
    if result.limit is not None:
        title += f", first {result.limit} documents of each task"
    shown = Table(title=title, show_footer=result.mean is not None)
    mean = "" if result.mean is None else _with_error(result.mean, result.mean_stderr)
    shown.add_column("task", footer="mean", no_wrap=True)
    shown.add_column("metric")
    shown.add_column("value", footer=mean, justify="right", no_wrap=True)
    shown.add_column("acc_norm", justify="right", no_wrap=True)
    shown.add_column("docs", justify="right")
    shown.add_column("split")
    for score in result.scores:
        norm = "" if score.acc_norm is None else _with_error(score.acc_norm, score.acc_norm_stderr)
        shown.add_row(
            score.task,
            score.metric,
            _with_error(score.value, score.stderr),
            norm,
            str(score.samples),
            score.split,
        )
    return shown


def _with_error(value: float, stderr: float | None) -> str:
    return f"{value:.3f}" if stderr is None else f"{value:.3f} ± {stderr:.3f}"
