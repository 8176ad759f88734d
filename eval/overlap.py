"""Whether calibration and evaluation text overlap: what was calibrated on is predicted too well.

Passages of LENGTH tokens are compared by 64-bit hashes, exactly, at every place of both texts. For
later a record keeps a few of them: the smallest KEPT hashes, which are a fair sample of all.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTH = 32
DISTINCT = 12  # different tokens a passage has at least: rules of dashes are in every text
KEPT = 1024
ENOUGH = 0.001  # of the passages: fewer are sayings, quotations and licences
_FIRST, _SECOND, _STEP = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
_SIGN = (1 << 63) - 1


@dataclass(frozen=True)
class Overlap:
    """How many of the evaluation windows have a passage that was calibrated on, and what share of
    their passages that is."""

    windows: int
    of: int
    share: float

    def note(self, data: str) -> str | None:
        """What the user should know, if anything."""
        if self.share < ENOUGH:
            return None
        return (
            f"{self.windows} of {self.of} evaluation windows ({data}) have passages of {LENGTH} "
            f"tokens that were calibrated on, {100 * self.share:.2g} % of all: the perplexity "
            "after pruning is too good."
        )


def hash_passages(windows: Tensor) -> Tensor:
    """The hash of every passage of `[windows, length]` tokens, `[windows, length - LENGTH + 1]`;
    negative where a passage has too few different tokens to say anything."""
    found = _mix(windows.long())
    width, power = 1, _STEP
    while width < LENGTH:
        if found.shape[1] <= width:
            return found.new_zeros((len(windows), 0))
        found = found[:, :-width] * _signed(power) + found[:, width:]
        width, power = 2 * width, power * power
    found = _mix(found) & _SIGN
    for row, tokens in zip(found, windows, strict=True):
        ordered = tokens.unfold(0, LENGTH, 1).sort(-1).values
        different = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(-1)
        row[different < DISTINCT] = -1
    return found


def _mix(values: Tensor) -> Tensor:
    """Spread over 64 bits; whole numbers wrap."""
    values = (values + 1) * _FIRST
    values = (values ^ (values >> 29)) * _SECOND
    return values ^ (values >> 32)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value > _SIGN else value


def find_overlap(calibrated: Tensor, evaluated: Tensor) -> Overlap:
    """Of windows of tokens."""
    return _count(_known(hash_passages(calibrated)), hash_passages(evaluated))


def _known(hashes: Tensor) -> Tensor:
    """Each hash once, in order."""
    return torch.unique(hashes[hashes >= 0])


def _count(known: Tensor, evaluated: Tensor) -> Overlap:
    """`known` hashes among those of the evaluation text."""
    counted = evaluated >= 0
    found = torch.isin(evaluated, known) & counted
    total = max(int(counted.sum()), 1)
    return Overlap(int(found.any(1).sum()), len(evaluated), int(found.sum()) / total)


def keep_sample(calibrated: Tensor) -> str:
    """The smallest hashes of what was calibrated on, as text."""
    kept = _known(hash_passages(calibrated))[:KEPT]
    return base64.b64encode(kept.numpy().astype("<i8").tobytes()).decode()


def find_overlap_with_sample(sample: object, evaluated: Tensor) -> Overlap | None:
    """The same from what a record keeps: passages with larger hashes are left out on both sides.
    None if it keeps nothing that makes sense."""
    if not isinstance(sample, str) or not sample or len(sample) > 16 * KEPT:
        return None
    try:
        read = bytearray(base64.b64decode(sample, validate=True))
    except (binascii.Error, ValueError):
        return None
    if not read or len(read) % 8:
        return None
    known = torch.frombuffer(read, dtype=torch.int64)
    hashes = hash_passages(evaluated)
    if len(known) >= KEPT:  # else it has all there are
        hashes = torch.where(hashes <= known.max(), hashes, -1)
    return _count(known, hashes)
