"""The size of a packed matrix is told from its mask before it is packed."""

from __future__ import annotations

import pytest
import torch

from symprune.runtime import blob
from symprune.runtime.layout import describe
from symprune.values.bits import packed_bits
from symprune.values.grid import GRIDS, OnGrid


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("columns", [64, 200, 512])
def test_floats_take_what_a_packed_matrix_of_them_has(share: float, columns: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, columns, dtype=torch.bfloat16).abs() + 1
    keep = torch.rand(64, columns) >= share
    packed = describe(blob.encode_floats([weight * keep]))
    data = packed.bits - 8 * (packed.begin + 64)  # without header and what kernels read past
    assert packed_bits(keep, 16) == pytest.approx(data, abs=packed.masked and 64)


@pytest.mark.parametrize("name", GRIDS)
def test_codes_take_their_scales_as_well(name: str) -> None:
    torch.manual_seed(0)
    grid, keep = GRIDS[name], torch.rand(16, 256) >= 0.5
    levels = torch.randint(grid.least, grid.most + 1, keep.shape).float()
    value = OnGrid.from_levels(levels, torch.ones(16, 4), grid, keep)
    packed = describe(blob.encode_codes([(value.codes, value.scales, keep)], name))
    assert packed_bits(keep, 16, grid) == packed.bits - 8 * (packed.begin + 64)
