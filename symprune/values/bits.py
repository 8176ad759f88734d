"""What a matrix takes in a packed file, told from its mask alone: mask, scales and values."""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.values.grid import GROUP, Grid, in_groups

MASK, SCALE = GROUP, 16  # bits of a group of a row


def packed_bits(keep: Tensor, float_bits: int, grid: Grid | None = None) -> int:
    """Bits of a matrix `[out, in]`: a group's mask, its scale on a grid, and the values it keeps,
    which end at a whole byte. There is no mask where all stay, or where floats take no less for it.
    float_bits: of a value on no grid."""
    groups = -(-keep.shape[1] // GROUP) * len(keep)
    each = float_bits if grid is None else grid.bits
    stays = in_groups(keep.to(torch.int64)).sum(-1)
    masked = int(((stays * each + 7) // 8 * 8).sum()) + MASK * groups
    whole = each * GROUP * groups
    if grid is None:
        return min(masked, whole)
    return SCALE * groups + (whole if keep.all() else masked)
