"""How far models kept the same weights: their masks, and what two have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from symprune.checkpoint.streamed_model import StreamedModel
from symprune.masks import count_true
from symprune.maskset import MaskSet


@dataclass(frozen=True)
class Overlap:
    """Kept weights in common as a share of those that either keeps, and what that share would be if
    the two had nothing to do with each other."""

    share: float
    by_chance: float


def masks_on_disk(streamed: StreamedModel) -> MaskSet:
    """The masks that a model on disk carries in its zeros, one block in memory at a time."""
    masks = MaskSet()
    for index in range(len(streamed)):
        with streamed.block(index):
            for matrix in streamed.layout.matrices(index):
                if matrix.parameter_name not in masks:
                    masks[matrix.parameter_name] = matrix.parameter.data != 0
    return masks


def overlap(one: MaskSet, other: MaskSet) -> Overlap | None:
    """Over all matrices that both have; None where they are not of one architecture."""
    common = either = by_chance = by_chance_either = 0.0
    for name in one:
        if name not in other:
            return None
        mine, theirs = one[name], other[name]
        if mine.shape != theirs.shape:
            return None
        both = int(count_true((mine & theirs).flatten()))
        kept, others = (int(count_true(mask.flatten())) for mask in (mine, theirs))
        common += both
        either += kept + others - both
        expected = kept * others / mine.numel()
        by_chance += expected
        by_chance_either += kept + others - expected
    if not either:
        return None
    return Overlap(common / either, by_chance / by_chance_either)


def overlaps(masks: Sequence[MaskSet | None]) -> list[list[Overlap | None]]:
    """Of every two; None for what has no masks, and for a model with itself."""
    table: list[list[Overlap | None]] = [[None] * len(masks) for _ in masks]
    for row, one in enumerate(masks):
        for column, other in enumerate(masks[:row]):
            if one is not None and other is not None:
                table[row][column] = table[column][row] = overlap(one, other)
    return table
