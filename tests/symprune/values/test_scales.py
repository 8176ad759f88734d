"""Scales: the best of those tried, exactly as stored, and rounding that needs no statistics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from symprune.values import scales as room
from symprune.values.grid import GRIDS, in_groups, spread
from symprune.values.scales import SHRUNK, choose_scales, nearest_levels, round_scale, round_to_grid

NAMES = list(GRIDS)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(weight: Tensor, scale: Tensor, name: str, counts: Tensor) -> Tensor:
    """Of each group, in double precision."""
    rounded = nearest_levels(weight, scale, GRIDS[name]) * spread(scale, weight.shape[1])
    return in_groups((rounded - weight).double().square() * counts).sum(-1)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_of_the_scales_that_are_tried_none_errs_less(name: str, masked: bool) -> None:
    weight, importance = normal(6, 130), normal(130, seed=1).exp()
    keep = normal(6, 130, seed=2) > 0 if masked else torch.ones(6, 130, dtype=torch.bool)
    counts = importance * keep
    chosen = choose_scales(weight, keep if masked else None, GRIDS[name], importance)
    assert torch.equal(chosen, round_scale(chosen))
    least = error(weight, chosen, name, counts)
    whole = in_groups(weight * keep).abs().amax(-1) / -GRIDS[name].least
    signs = (1, -1) if name.endswith("z") else (1,)
    for factor in (sign * each for each in SHRUNK for sign in signs):
        other = error(weight, round_scale(factor * whole), name, counts)
        assert (least <= other * (1 + 130 * torch.finfo(torch.float32).eps)).all()


def test_the_side_with_a_level_more_is_that_of_the_largest_weight() -> None:
    weight = torch.full((2, 64), 0.25)
    weight[0, 3], weight[1, 3] = 1, -1
    scales = choose_scales(weight, None, GRIDS["int2z"])
    assert (scales[0] < 0).all() and (scales[1] > 0).all()
    dense = round_to_grid(weight, GRIDS["int2z"]).dense()
    assert torch.equal(dense[0, 3], -dense[1, 3]) and dense[0, 3] > 0.5


def test_eight_bits_lose_next_to_nothing() -> None:
    """At most half a level, and half a level is at most 1/254 of a group's largest weight; a scale
    in bfloat16 is known to 1/256, so the largest may be cut by as much."""
    weight = normal(20, 200)
    lost = (round_to_grid(weight, GRIDS["int8"]).dense() - weight).abs()
    largest = in_groups(weight).abs().amax(-1, keepdim=True)
    assert (in_groups(lost) <= largest / 16).all()
    assert lost.square().mean() < 1e-4 * weight.square().mean()


@pytest.mark.parametrize("name", NAMES)
def test_fewer_bits_lose_more_and_none_lose_all(name: str) -> None:
    weight = normal(30, 256)
    bound = {"int8": 0.01, "int4": 0.13, "int3": 0.25, "int2": 0.45}[name.removesuffix("z")]
    lost = round_to_grid(weight, GRIDS[name]).dense() - weight
    assert bound / 3 < (lost.norm() / weight.norm()) < bound


@pytest.mark.parametrize("name", NAMES)
def test_empty_groups_and_rows_are_zero(name: str) -> None:
    weight = normal(4, 130)
    weight[0] = 0
    keep = torch.ones(4, 130, dtype=torch.bool)
    keep[1, :64] = False
    dense = round_to_grid(weight, GRIDS[name], keep).dense(keep)
    assert (dense[0] == 0).all() and (dense[1, :64] == 0).all()
    assert torch.isfinite(dense).all()


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e12])
@pytest.mark.parametrize("name", NAMES)
def test_the_size_of_the_weights_does_not_matter(name: str, size: float) -> None:
    weight = normal(4, 64)
    lost = round_to_grid(weight * size, GRIDS[name]).dense() / size - weight
    assert lost.norm() < 0.4 * weight.norm()


def test_a_few_rows_at_a_time_make_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(33, 70).bfloat16()
    whole = round_to_grid(weight, GRIDS["int4"])
    monkeypatch.setattr(room, "AT_ONCE", 150)
    parts = round_to_grid(weight, GRIDS["int4"])
    assert torch.equal(whole.codes, parts.codes) and torch.equal(whole.scales, parts.scales)
