"""What a pruning job leaves in its record so that it can be repeated, and the job it becomes then.

Text and masks that were given as files are known by their SHA-256, what was drawn from a text by
the digest of its tokens: a run is not repeated on another text that has the same name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from symprune import calibration
from symprune.card.plan import CALIBRATION, EVALUATION, MASKS, Plan, SourceFile
from symprune.checkpoint import resume
from symprune.errors import SympruneError
from symprune.jobs.texts import Texts
from symprune.machine.checksums import FILE as CHECKSUMS
from symprune.maskset import FILE_NAME
from symprune.recipe import Recipe


class Run(Protocol):
    """A pruning job's settings."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def dtype(self) -> str: ...
    @property
    def compute_dtype(self) -> str: ...
    @property
    def evaluate(self) -> bool: ...
    @property
    def held_out(self) -> str: ...
    @property
    def eval_windows(self) -> int | None: ...
    @property
    def report_error(self) -> bool: ...
    @property
    def batch_size(self) -> int | None: ...
    @property
    def prompts(self) -> tuple[str, ...]: ...
    @property
    def masks(self) -> Path | None: ...


def describe_run(job: Run, texts: Texts) -> dict[str, Any]:
    """`run` and `texts` of a record: the settings the output depends on, and what was read."""
    used = isinstance(texts.data, Tensor)
    files = [vars(each) for each in _files(job, used)]
    tokens = resume.digest(texts.data) if used else None
    settings = {
        "dtype": job.dtype,
        "compute_dtype": job.compute_dtype,
        "evaluate": job.evaluate,
        "eval_data": job.held_out if job.evaluate else None,
        "eval_windows": job.eval_windows if job.evaluate else None,
        "report_error": job.report_error or None,
        "batch_size": job.batch_size,
        "prompts": list(job.prompts) or None,
        "masks": None if job.masks is None else str(job.masks),
    }
    run = {name: value for name, value in settings.items() if value is not None}
    return {"run": run, "texts": {"tokens": tokens, "files": files}}


def check_same_text(plan: Plan | None, described: Mapping[str, Any]) -> None:
    """Fail before any work where a run that is repeated has drawn other tokens."""
    found = described["texts"]["tokens"]
    if plan is None or plan.tokens is None or found == plan.tokens:
        return
    raise SympruneError(
        f"The calibration text {plan.recipe.get('calibration')!r} gives other tokens than those "
        f"the model was made with ({found} instead of {plan.tokens}): it has changed, or the "
        "tokenizer has."
    )


def _files(job: Run, used: bool) -> Iterator[SourceFile]:
    asked = {CALIBRATION: job.recipe.calibration if used else None}
    asked[EVALUATION] = job.held_out if job.evaluate else None
    for use, source in asked.items():
        for name in [] if source is None else calibration.files_of(source):
            if name not in calibration.SOURCES and Path(name).is_file():
                yield SourceFile.of(use, Path(name))
    if job.masks is not None:
        found = SourceFile.of(MASKS, file_of_masks(job.masks))
        yield SourceFile(MASKS, str(job.masks), found.sha256, found.size)


def file_of_masks(masks: Path) -> Path:
    """The file that masks are known by: of a packed folder, in which they lie beside their values,
    the list of checksums."""
    if not masks.is_dir():
        return masks
    file = masks / FILE_NAME
    return file if file.is_file() else masks / CHECKSUMS
