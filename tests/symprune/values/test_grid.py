"""Grids: every level is what the packed files say it is, and a weight goes to the nearest one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretend_device import DEVICE, OnDevice, PretendDevice
from torch import Tensor

from symprune.values.grid import GRIDS, GROUP, OnGrid, fetch, groups_of, in_groups, spread
from symprune.values.scales import round_to_grid

NAMES = list(GRIDS)


def all_levels(name: str) -> Tensor:
    if name == "int8":
        return torch.arange(-127.0, 128.0)
    bits = GRIDS[name].bits
    half = 2.0 ** (bits - 1)
    if name.endswith("z"):
        return torch.arange(-half, half)
    return torch.cat([torch.arange(-half, 0), torch.arange(1, half + 1)])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
def test_codes_stand_for_the_levels_of_the_packed_files(name: str) -> None:
    grid, levels = GRIDS[name], all_levels(name)
    codes = grid.codes(levels)
    assert codes.dtype == torch.uint8
    assert torch.equal(grid.levels(codes), levels)
    first = 1 if name == "int8" else 0
    assert torch.equal(codes.long(), torch.arange(first, first + len(levels)))


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_goes_to_the_nearest_level(name: str) -> None:
    grid, levels = GRIDS[name], all_levels(name)
    ratio = torch.cat([1.2 * grid.most * normal(2000), levels, torch.tensor([1e30, -1e30, 0.0])])
    found = grid.nearest(ratio)
    distance = (ratio.unsqueeze(1) - levels).abs()
    assert torch.isin(found, levels).all()
    assert torch.equal((found - ratio).abs(), distance.amin(1))


@given(st.floats(-200, 200, width=32), st.sampled_from(NAMES))
def test_rounding_again_changes_nothing(ratio: float, name: str) -> None:
    level = GRIDS[name].nearest(torch.tensor([ratio]))
    assert torch.equal(GRIDS[name].nearest(level), level)


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_may_be_passed_straight_through(name: str) -> None:
    ratio = normal(50).requires_grad_()
    level = ratio + (GRIDS[name].nearest(ratio) - ratio).detach()
    level.sum().backward()
    assert ratio.grad is not None and torch.equal(ratio.grad, torch.ones(50))
    assert torch.isin(GRIDS[name].nearest(ratio.detach()), all_levels(name)).all()


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 150])
def test_the_last_group_of_a_row_is_what_is_left(columns: int) -> None:
    matrix = normal(3, columns)
    groups = -(-columns // GROUP)
    grouped = in_groups(matrix)
    assert grouped.shape == (3, groups, GROUP)
    assert torch.equal(grouped.reshape(3, -1)[:, :columns], matrix)
    scales = normal(3, groups).bfloat16()
    each = spread(scales, columns)
    for number, part in enumerate(groups_of(columns)):
        assert (each[:, part] == scales[:, number : number + 1].float()).all()


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_scale_times_level_and_zero_where_pruned(name: str) -> None:
    weight = normal(5, 100)
    keep = normal(5, 100, seed=1) > 0
    found = round_to_grid(weight, GRIDS[name], keep)
    assert found.codes.dtype == torch.uint8 and found.scales.dtype == torch.bfloat16
    assert found.scales.shape == (5, 2)
    dense = found.dense(keep)
    for row in range(5):
        for column in range(100):
            scale = found.scales[row, column // GROUP].double()
            level = GRIDS[name].levels(found.codes[row, column]).double()
            expected = (scale * level).float() if keep[row, column] else torch.tensor(0.0)
            assert torch.equal(dense[row, column], expected)
    assert (found.codes[~keep] == 0).all()


def test_matrices_on_a_device_are_brought_together() -> None:
    made = {
        name: round_to_grid(normal(4, columns), GRIDS[name])
        for name, columns in zip(NAMES, (3, 64, 70, 130, 1, 65, 128), strict=True)
    }
    with PretendDevice() as device:
        there = {
            name: OnGrid(each.codes.to(DEVICE), each.scales.to(DEVICE), each.grid)
            for name, each in made.items()
        }
        found = fetch(there)
    assert sum(device.waits.values()) == 1
    for name, each in made.items():
        assert not isinstance(found[name].codes, OnDevice)
        assert torch.equal(found[name].codes, each.codes)
        assert torch.equal(found[name].scales, each.scales)
    assert fetch(made) == made


def error_with_gap(weight: Tensor, counts: Tensor, keep: Tensor, bits: int, gap: float) -> float:
    """Of what stays, rounded to levels gap, gap + 1, ... on both sides, at the best scale."""
    levels, kept = 2 ** (bits - 1), weight * keep
    whole = kept.abs().amax(1, keepdim=True) / (levels - 1 + gap)
    least = torch.full_like(whole, torch.inf)
    for scale in (whole * (1 - 0.03 * step) for step in range(25)):
        size = ((kept / scale).abs() - gap).round().clamp(0, levels - 1) + gap
        lost = (size * scale - kept.abs()).square() * counts * keep
        least = torch.minimum(least, lost.sum(1, keepdim=True))
    return float(least.sum())


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("pattern", ["2:4", "channels"])
def test_under_a_mask_no_gap_around_zero_is_better_than_one_step(bits: int, pattern: str) -> None:
    """Which is why the grids without a zero begin at 1. Half of normal weights is removed, by 2:4
    or where channels differ in size, as layers' inputs do."""
    weight, size = normal(2000, GROUP), torch.ones(GROUP)
    if pattern == "2:4":
        fours = weight.abs().view(-1, 4)
        keep = fours >= fours.topk(2, 1).values[:, 1:]
    else:
        size = normal(GROUP, seed=1).mul(0.5).exp()
        score = (weight * size).abs()
        keep = score >= score.median()
    keep = keep.view_as(weight)
    errors = {
        gap: error_with_gap(weight, size.square(), keep, bits, gap) for gap in (0.5, 1, 1.5, 2)
    }
    assert min(errors, key=lambda gap: errors[gap]) == 1
