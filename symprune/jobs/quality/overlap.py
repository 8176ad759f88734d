"""A warning where a model is measured on what it was calibrated on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from symprune.checkpoint.record import read_record
from symprune.eval.overlap import Overlap, find_overlap, find_overlap_with_sample, keep_sample
from symprune.eval.perplexity import cut

PASSAGES = "calibration_passages"
"""What a record calls the hashes of some passages that were calibrated on."""


def warn(
    calibrated: Any, ids: Tensor | None, data: str, seqlen: int, windows: int | None
) -> list[str]:
    """The sentence for calibration tokens, if there are any, that are in the text of a measure."""
    if ids is None or not isinstance(calibrated, Tensor):
        return []
    return _said(find_overlap(calibrated, cut(ids, seqlen, windows)), data)


def warn_of_folder(
    folder: Path, ids: Tensor, data: str, seqlen: int, windows: int | None
) -> list[str]:
    """The same for a pruned model, from what its record keeps."""
    record = read_record(folder) or {}
    rows = cut(ids, seqlen, windows)
    return _said(find_overlap_with_sample(record.get(PASSAGES), rows), data)


def _said(found: Overlap | None, data: str) -> list[str]:
    note = None if found is None else found.note(data)
    return [] if note is None else [note]


def passages_of(calibrated: Any) -> dict[str, str]:
    """What a record keeps of the calibration tokens, if there are any."""
    return {PASSAGES: keep_sample(calibrated)} if isinstance(calibrated, Tensor) else {}
