"""Documents of a task from a folder: TASK.jsonl files, or data sets as the hub has them.

Of a data set the folder has a copy under its name (`cais/mmlu` or `mmlu`), with Parquet or JSON
lines for each split, in a folder for each configuration or with all together, or as `save_to_disk`
leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symprune.errors import SympruneError
from symprune.validation import parse_json

Row = dict[str, Any]

ALL_TOGETHER, WHICH = "all", "subject"  # a data set of many tasks, and what tells them apart
ENDINGS = (".parquet", ".jsonl", ".json")
_GLUE_ENTAILMENT = {"entailment": 0, "not_entailment": 1}


@dataclass(frozen=True)
class Documents:
    """The questions of a task, examples with answers if any are wanted, and where they are."""

    rows: list[Row]
    split: str
    examples: list[Row]
    source: Path


def find(name: str, config: Mapping[str, Any], folder: Path, shots: int) -> Documents:
    """The documents of a task, and examples for its prompts, at least `shots`.

    Questions are of the validation split, also where the harness would use the test split (ARC,
    OpenBookQA), because that is the split whose answers are public for every task; only a task that
    has no validation split reads its test split.
    """
    split = config.get("validation_split") or config.get("test_split") or "validation"
    source, rows = _read(name, config, folder, split, folder / f"{name}.jsonl")
    if rows is None:
        raise SympruneError(
            f"There is no data for task '{name}': '{source}' does not exist, nor a copy of the "
            f"data set {config.get('dataset_path')} in '{folder}'."
        )
    return Documents(rows, split, _examples(name, config, folder, shots), source)


def _examples(name: str, config: Mapping[str, Any], folder: Path, shots: int) -> list[Row]:
    if shots == 0:
        return []
    names = ("fewshot_split", "training_split", "validation_split")
    split = next((config[key] for key in names if config.get(key)), "train")
    source, rows = _read(name, config, folder, split, folder / f"{name}.{split}.jsonl")
    if rows is None or len(rows) <= shots:
        there = "there are none" if rows is None else f"there are {len(rows)}"
        raise SympruneError(
            f"--num-fewshot {shots} needs more examples of task '{name}' than that, and {there}; "
            f"they belong into '{source}'."
        )
    return rows


def _read(
    name: str, config: Mapping[str, Any], folder: Path, split: str, file: Path
) -> tuple[Path, list[Row] | None]:
    """Where a split is, and its rows: a file of the task's own, one of all its siblings, or a data
    set; None where there is none of them."""
    subset = config.get("dataset_name")
    if file.is_file():
        return file, [_like_the_hub(name, row) for row in _read_lines(file)]
    if subset and name.endswith(f"_{subset}"):
        shared = file.with_name(file.name.replace(name, name.removesuffix(f"_{subset}"), 1))
        if shared.is_file():
            return shared, _of_subset(_read_lines(shared), subset)
    data_set = str(config.get("dataset_path") or name)
    for base in dict.fromkeys((folder / data_set, folder / Path(data_set).name)):
        for part in filter(None, (subset, ALL_TOGETHER, ".")):
            rows = _read_split(base / part, split)
            if rows and subset and part != subset and WHICH in rows[0]:
                rows = _of_subset(rows, subset)
            if rows:
                return base / part, [_like_the_hub(name, row) for row in rows]
    return file, None


def _of_subset(rows: list[Row], subset: str) -> list[Row] | None:
    return [row for row in rows if row.get(WHICH) == subset] or None


def _read_split(folder: Path, split: str) -> list[Row] | None:
    """The rows of a data set's split, if the folder has it."""
    import datasets

    if not folder.is_dir():
        return None
    try:
        if (folder / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(folder))
            return saved[split].to_list() if split in saved else None
        places = (folder, folder / "data")
        files = sorted(
            path for place in places if place.is_dir() for path in place.iterdir()
            if path.suffix in ENDINGS and path.name.split("-")[0].split(".")[0] == split
        )  # fmt: skip
        rows: list[Row] = []
        for path in files:
            if path.suffix == ".parquet":
                rows += datasets.Dataset.from_parquet(str(path), keep_in_memory=True).to_list()
            else:
                rows += _read_lines(path)
    except SympruneError:
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise SympruneError(f"The data set in '{folder}' cannot be read: {said}.") from error
    return rows or None


def _read_lines(file: Path) -> list[Row]:
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
