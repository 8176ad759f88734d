"""Mask and codes found together: as many weights stay, where they may, and no row errs more."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretend_device import DEVICE, PretendDevice
from rounding_problems import COLUMNS, GRAMS, damped, errors, mixed, normal, problem, slack
from torch import Tensor

from symprune import Recipe, masks
from symprune.engine import decide
from symprune.masks import Pattern
from symprune.stats import GRAM, SQUARE, ChannelStats
from symprune.update.damped_gram import DampedGram
from symprune.values import VALUES
from symprune.values.descent import find_start, weights_of
from symprune.values.exchange import exchange
from symprune.values.gptq import Found
from symprune.values.grid import GRIDS

NAMES = list(GRIDS)


def exchanged(
    weight: Tensor, keep: Tensor, gram: DampedGram, name: str, among: int | None = None
) -> tuple[Found, tuple[Tensor, Found]]:
    """Where it began, and where it ended: mask, and levels and scales."""
    start = find_start(weight, weight * keep, keep, gram, GRIDS[name])
    mask, levels, scales = exchange(weight, keep, gram, GRIDS[name], start, 4, among)
    return start, (mask, (levels, scales))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", sorted(GRAMS))
def test_rows_keep_as_many_and_err_no_more(kind: str, name: str) -> None:
    """However many a row keeps: here one keeps all, one none, and the others differ."""
    weight = normal(12, COLUMNS)
    keep = masks.keep_count(weight.abs(), 500, "layer")
    keep[0], keep[1] = True, False
    gram = damped(kind)
    start, (mask, found) = exchanged(weight, keep, gram, name)
    assert torch.equal(mask.sum(1), keep.sum(1))
    before = errors(gram, weight, weights_of(start, keep))
    after = errors(gram, weight, weights_of(found, mask))
    assert (after <= before + slack(gram, weight)).all()


@pytest.mark.parametrize("text", ["2:4", "4:8", "1:4"])
def test_a_pattern_stays_one(text: str) -> None:
    pattern = Pattern.parse(text)
    weight = normal(12, 96)
    keep = masks.keep_n_of_m(weight.abs(), pattern)
    gram = damped("correlated", 96)
    start, (mask, found) = exchanged(weight, keep, gram, "int3", pattern.m)
    assert (mask.reshape(-1, pattern.m).sum(1) == pattern.n).all()
    assert not torch.equal(mask, keep)
    before = errors(gram, weight, weights_of(start, keep))
    after = errors(gram, weight, weights_of(found, mask))
    assert (after <= before + slack(gram, weight)).all() and after.sum() < before.sum()


@given(st.integers(1, 3), st.integers(1, 140), st.sampled_from(sorted(GRAMS)), st.integers(0, 99))
def test_any_shape_and_any_mask_will_do(rows: int, columns: int, kind: str, seed: int) -> None:
    weight = normal(rows, columns, seed=seed)
    keep = normal(rows, columns, seed=seed + 1) > 0
    _, (mask, found) = exchanged(weight, keep, damped(kind, columns, seed), "int2")
    assert torch.equal(mask.sum(1), keep.sum(1))
    assert torch.isfinite(weights_of(found, mask)).all()


@pytest.mark.parametrize("seed", range(6))
def test_none_errs_less_than_the_best_of_all_masks_and_levels(seed: int) -> None:
    """Five columns of two bits, three of them kept; each choice with the best of all scales."""
    weight, keep = problem(4, 5, 0.4, seed)
    gram = damped("correlated", 5, seed)
    whole = (gram.gram + gram.added.diag()).double()
    choices = torch.tensor(list(itertools.product([-2.0, -1.0, 0, 1.0, 2.0], repeat=5))).double()
    choices = choices[(choices != 0).sum(1) == 3]
    _, (mask, found) = exchanged(weight, keep, gram, "int2")
    after = errors(gram, weight, weights_of(found, mask))
    for row in range(4):
        curved = ((choices @ whole) * choices).sum(1)
        along = (choices @ whole @ weight[row].double()).clamp(min=0)
        constant = weight[row].double() @ whole @ weight[row].double()
        best = (constant - along.square() / curved).amin()
        assert after[row] >= best - slack(gram, weight)[row]


def test_the_fewer_levels_the_more_the_mask_changes() -> None:
    weight, keep = problem(32, COLUMNS, 0.5)
    gram = damped("correlated")
    moved = {}
    for name in ("int8", "int3", "int2"):
        fitted = weight * keep
        gram.descend(weight, fitted, keep, 20)
        start = find_start(weight, fitted, keep, gram, GRIDS[name])
        mask, _, _ = exchange(weight, keep, gram, GRIDS[name], start, 4)
        moved[name] = int((mask & ~keep).sum())
    assert 0 < moved["int3"] < moved["int2"]


def measured(x: Tensor) -> ChannelStats:
    stats = ChannelStats(x.shape[-1], (SQUARE, GRAM))
    stats.add(x)
    return stats


def test_only_a_mask_that_was_found_with_the_weights_is_found_again() -> None:
    weight, stats = normal(24, COLUMNS), measured(mixed(800, COLUMNS, 3))
    for update, same in (({"name": "lsq", "rounds": 3}, False), ("lsq", True), (None, True)):
        recipe = Recipe(method="wanda", update=update)
        plain, valued, fixed = (
            decide.decide("w", "mlp", weight, stats, None, recipe.with_changes(values=values)).keep
            for values in (None, "int3", {"name": "int3", "exchanges": 0})
        )
        assert torch.equal(plain, fixed)
        assert torch.equal(plain, valued) is same
        assert torch.equal(plain.sum(1), valued.sum(1))


@pytest.mark.parametrize("pattern", [None, Pattern(2, 4)])
def test_a_device_finds_what_the_cpu_finds(pattern: Pattern | None) -> None:
    weight = normal(6, 72)
    score = weight.abs()
    keep = masks.keep_by_row(score, 0.5) if pattern is None else masks.keep_n_of_m(score, pattern)
    stats = measured(mixed(200, 72, 3))
    rounding = VALUES["int3"]()
    expected = rounding.find(weight, keep, weight * keep, stats, pattern)
    with PretendDevice() as device:
        there = ChannelStats(72, [GRAM], device=DEVICE)
        there.sums[GRAM], there.tokens = stats.gram.to(DEVICE), stats.tokens
        placed, mask = weight.to(DEVICE), keep.to(DEVICE)
        device.waits.clear()
        found = rounding.find(placed, mask, placed * mask, there, pattern)
        assert device.own_waits == 0, device.waits
        there_keep, codes = found[0].cpu(), found[1].codes.cpu()
    assert torch.equal(there_keep, expected[0]) and torch.equal(codes, expected[1].codes)
