"""Values that look at a layer's outputs: errors only fall, whatever the Gram matrix is like."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretend_device import DEVICE, PretendDevice
from rounding_problems import COLUMNS, GRAMS, damped, errors, mixed, normal, problem, slack
from torch import Tensor

from symprune.errors import SympruneError
from symprune.stats import GRAM, ChannelStats
from symprune.update.damped_gram import DampedGram
from symprune.values import VALUES, choose_rounding
from symprune.values.descent import descend, find_start, weights_of
from symprune.values.gptq import Found, Spreading, gptq
from symprune.values.grid import GRIDS, GROUP, Grid, spread
from symprune.values.scales import choose_scales, nearest_levels

NAMES = list(GRIDS)


def nearest(fitted: Tensor, keep: Tensor, gram: DampedGram, name: str) -> Found:
    scales = choose_scales(fitted, keep, GRIDS[name], gram.diagonal)
    return nearest_levels(fitted, scales, GRIDS[name]), scales


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", sorted(GRAMS))
def test_no_sweep_makes_a_row_worse(kind: str, name: str, share: float) -> None:
    weight, keep = problem(12, COLUMNS, share)
    gram, grid = damped(kind), GRIDS[name]
    start = find_start(weight, weight * keep, keep, gram, grid)
    before = errors(gram, weight, weights_of(start, keep))
    for sweeps in range(1, 5):
        found = descend(weight, keep, gram, grid, start, sweeps)
        after = errors(gram, weight, weights_of(found, keep))
        assert (after <= before + slack(gram, weight)).all()
        before = after


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", sorted(set(GRAMS) - {"beyond all numbers"}))
def test_descent_errs_no_more_than_the_nearest_weights_and_than_gptq(kind: str, name: str) -> None:
    weight, keep = problem(12, COLUMNS, 0.5)
    gram, grid = damped(kind), GRIDS[name]
    fitted = weight * keep
    gram.descend(weight, fitted, keep, 20)
    start = find_start(weight, fitted, keep, gram, grid)
    found = errors(gram, weight, weights_of(descend(weight, keep, gram, grid, start, 3), keep))
    rivals = (nearest(fitted, keep, gram, name), gptq(fitted, keep, Spreading.along(gram), grid))
    for rival in rivals:
        assert (found <= errors(gram, weight, weights_of(rival, keep)) + slack(gram, weight)).all()


@given(
    st.integers(1, 3),
    st.integers(1, 140),
    st.sampled_from(sorted(GRAMS)),
    st.sampled_from(NAMES),
    st.floats(0, 1),
    st.integers(0, 1000),
)
def test_whatever_the_shape_and_the_mask_pruned_weights_stay_zero_and_the_rest_are_numbers(
    rows: int, columns: int, kind: str, name: str, share: float, seed: int
) -> None:
    weight = normal(rows, columns, seed=seed)
    keep = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < share
    stats = ChannelStats(columns, [GRAM])
    stats.sums[GRAM].copy_(GRAMS[kind](columns, seed))
    stats.tokens = 4 * columns
    found = VALUES[name]()(weight, keep, None, stats)
    made = found.dense(keep)
    assert torch.isfinite(made).all() and (made[~keep] == 0).all()
    assert (found.codes[~keep] == 0).all() and torch.isfinite(found.scales).all()
    if name == "int8":
        assert (found.codes[keep] > 0).all()
    else:
        assert (found.codes < 2 ** GRIDS[name].bits).all()


@pytest.mark.parametrize("name", NAMES)
def test_where_channels_know_nothing_of_each_other_all_ways_are_one(name: str) -> None:
    """GPTQ has no error to spread, and descent ends where each weight is the nearest."""
    weight, keep = problem(12, COLUMNS, 0.4)
    gram, grid = damped("diagonal"), GRIDS[name]
    near = nearest(weight, keep, gram, name)
    loop = gptq(weight, keep, Spreading.along(gram), grid)
    # The diagonal comes back from two factorisations and an inverse, each of them rounded.
    torch.testing.assert_close(weights_of(loop, keep), weights_of(near, keep), rtol=1e-2, atol=1e-2)
    levels, scales = descend(weight, keep, gram, grid, near, 40)
    best = nearest_levels(weight, scales, grid)
    middle = (weight / spread(scales, COLUMNS) - best).abs() > 0.4995
    assert ((levels == best) | ~keep | middle).all()


@pytest.mark.parametrize("seed", range(6))
def test_descent_lies_between_the_best_there_is_and_the_nearest(seed: int) -> None:
    """Four columns of two bits: every choice of levels is tried, each with the best of all scales,
    and no start of many leads below it."""
    weight, keep = problem(5, 4, 0.25, seed)
    gram, grid = damped("correlated", 4, seed), GRIDS["int2"]
    whole = (gram.gram + gram.added.diag()).double()
    choices = torch.tensor(list(itertools.product([-2.0, -1.0, 0.0, 1.0], repeat=4))).double()
    near = nearest(weight, keep, gram, "int2")
    least = torch.full((5,), torch.inf).double()
    for number in range(40):
        drawn = torch.randint(0, 4, (5, 4), generator=torch.Generator().manual_seed(number))
        start = near if number == 0 else (grid.levels(drawn), near[1])
        found = errors(gram, weight, weights_of(descend(weight, keep, gram, grid, start, 4), keep))
        began = errors(gram, weight, weights_of(start, keep))
        assert (found <= began + slack(gram, weight)).all()
        least = torch.minimum(least, found)
    for row in range(5):
        kept = choices * keep[row]
        curved = ((kept @ whole) * kept).sum(1)
        along = kept @ whole @ weight[row].double()
        constant = weight[row].double() @ whole @ weight[row].double()
        best = (constant - along.square() / curved.clamp(min=1e-30)).amin()
        assert least[row] >= best - slack(gram, weight)[row]
        assert (
            least[row]
            <= errors(gram, weight, weights_of(near, keep))[row] + slack(gram, weight)[row]
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_layers_outputs_are_kept_better_than_by_rounding(name: str) -> None:
    weight, keep = problem(32, COLUMNS, 0.5)
    x = mixed(800, COLUMNS, 3)
    stats = ChannelStats(COLUMNS, [GRAM])
    stats.add(x)
    lost = {}
    for solve in ("nearest", "gptq", "descent"):
        found = VALUES[name](solve=solve)(weight, keep, None, stats).dense(keep)
        lost[solve] = float((x @ (found - weight).T).norm())
    assert lost["descent"] < lost["gptq"] < lost["nearest"]


def test_eight_bits_fit_nearly_as_well_as_none() -> None:
    weight, keep = problem(16, COLUMNS, 0.5)
    stats = ChannelStats(COLUMNS, [GRAM])
    stats.add(mixed(800, COLUMNS, 3))
    gram = DampedGram.from_gram(stats.gram, 0.01, 2 * stats.noise)
    fitted = weight * keep
    gram.descend(weight, fitted, keep, 50)
    found = VALUES["int8"]()(weight, keep, fitted, stats).dense(keep)
    ours, theirs = errors(gram, weight, found), errors(gram, weight, fitted)
    assert (ours < 1.01 * theirs).all()


def test_a_hessian_that_cannot_be_inverted_is_one_sentence_for_gptq() -> None:
    stats = ChannelStats(8, [GRAM])
    stats.sums[GRAM].fill_(1e38)
    stats.tokens = 8
    with pytest.raises(SympruneError, match="raise its damping"):
        VALUES["int4"](solve="gptq")(normal(4, 8), None, None, stats)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("solve", ["nearest", "gptq", "descent"])
@pytest.mark.parametrize("name", NAMES)
def test_a_device_finds_what_the_cpu_finds_and_hardly_waits(
    name: str, solve: str, share: float
) -> None:
    weight, keep = problem(6, 70, share)
    kept = keep if share else None
    stats = ChannelStats(70, [GRAM])
    stats.add(mixed(200, 70, 3))
    expected = VALUES[name](solve=solve)(weight, kept, None, stats)
    with PretendDevice() as device:
        there = ChannelStats(70, [GRAM], device=DEVICE)
        there.sums[GRAM].copy_(stats.gram)
        there.tokens = stats.tokens
        mask = None if kept is None else kept.to(DEVICE)
        placed = weight.to(DEVICE)
        device.waits.clear()
        found = VALUES[name](solve=solve)(placed, mask, None, there)
        # GPTQ asks once whether its Hessian was positive definite; conjugate gradients ask
        # whether all rows are done.
        assert device.own_waits <= (1 if solve == "gptq" else 3), device.waits
        codes, scales = found.codes.cpu(), found.scales.cpu()
    assert torch.equal(codes, expected.codes) and torch.equal(scales, expected.scales)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("int5", "Unknown values 'int5'; choose int8, int4, int3, int2"),
        ({"name": "int4", "solve": "best"}, "solve must be one of descent, gptq, nearest"),
        ({"name": "int4", "sweeps": 0}, "sweeps must be above 0"),
        ({"name": "int4", "sweps": 2}, "did you mean sweeps"),
        ({"name": "int4", "shrink": -1}, "shrink must be 0 or more"),
    ],
)
def test_bad_options_are_one_sentence(options: Any, said: str) -> None:
    with pytest.raises(SympruneError, match=said):
        choose_rounding(options)


def test_a_scale_that_is_too_short_is_fitted_to_its_levels() -> None:
    """The levels of the start are right; of the scales only the true ones make no error."""
    grid = GRIDS["int2"]
    levels = grid.levels(torch.randint(0, 4, (6, 128)))
    scales = torch.tensor([1.0, 0.5]).expand(6, 2)
    weight = levels * scales.repeat_interleave(64, 1)
    x = torch.randn(500, 128)
    gram = DampedGram.from_gram(x.T @ x, 0.01, 0.0)
    keep = torch.ones_like(weight, dtype=torch.bool)
    found, fitted = descend(weight, keep, gram, grid, (levels, 0.8 * scales), 3)
    assert torch.equal(found, levels)
    torch.testing.assert_close(fitted, scales, rtol=0.01, atol=0)


def test_gptq_of_several_groups_is_its_loop_a_column_at_a_time() -> None:
    """In double precision: every rounding is told to all columns behind it, whatever their group.
    A weight in the middle between two levels may go either way."""
    grid, (rows, columns) = GRIDS["int4"], (16, 150)
    weight, x = (
        torch.randn(rows, columns),
        torch.randn(600, columns) @ torch.randn(columns, columns),
    )
    gram = DampedGram.from_gram(x.T @ x, 0.01, 0.0)
    keep = torch.rand(rows, columns) < 0.6
    levels, scales = gptq(weight, keep, Spreading.along(gram), grid)
    hessian = gram.gram.double() + gram.added.double().diag()
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    left, expected = weight.double(), torch.empty(rows, columns)
    for j in range(columns):
        if j % 64 == 0:
            group = slice(j, min(j + 64, columns))
            importance = 1 / upper.diagonal()[group].square()
            chosen = choose_scales(left[:, group].float(), keep[:, group], grid, importance.float())
            torch.testing.assert_close(chosen.squeeze(1), scales[:, j // 64], rtol=0.05, atol=0)
        scale = scales[:, j // 64].double()
        expected[:, j] = grid.nearest((left[:, j] / scale).float())
        lost = (left[:, j] - levels[:, j] * scale * keep[:, j]) / upper[j, j]
        left = left - torch.outer(lost, upper[j]) * (torch.arange(columns) > j)
    assert (levels != expected).float().mean() < 0.01


def descend_plainly(
    weight: Tensor, keep: Tensor, hessian: Tensor, grid: Grid, start: Found, sweeps: int
) -> Found:
    """Coordinate descent of one row by trial: of all levels of a weight the one with the least
    error, then of a group's scale and the one that least squares finds. In double precision."""
    levels, scales = start[0].double() * keep, start[1].double()

    def error(levels: Tensor, scales: Tensor) -> Tensor:
        lost = weight - levels * scales.repeat_interleave(GROUP, -1)[..., : len(weight)]
        return ((lost @ hessian) * lost).sum(-1)

    for _ in range(sweeps):
        for number in range(len(scales)):
            group = torch.arange(number * GROUP, min((number + 1) * GROUP, len(weight)))
            for j in group[keep[group]]:
                tried = levels.repeat(grid.most - grid.least + 1, 1)
                tried[:, j] = torch.arange(grid.least, grid.most + 1)
                levels = tried[error(tried, scales).argmin()]
            alone = torch.zeros_like(levels)
            alone[group] = levels[group]
            rest = weight - (levels - alone) * scales.repeat_interleave(GROUP)[: len(weight)]
            fitted = (alone @ hessian @ rest) / (alone @ hessian @ alone)
            other = scales.clone()
            other[number] = fitted.bfloat16().double()
            if error(levels, other) < error(levels, scales) and other[number] * scales[number] > 0:
                scales = other
    return levels, scales


@pytest.mark.parametrize("name", ["int3", "int2"])
def test_descent_is_what_trying_every_level_of_every_weight_finds(name: str) -> None:
    """A weight in the middle between two levels may go either way, and others then follow it."""
    weight, keep = problem(4, COLUMNS, 0.4)
    gram, grid = damped("correlated"), GRIDS[name]
    hessian = gram.gram.double() + gram.added.double().diag()
    start = nearest(weight, keep, gram, name)
    levels, scales = descend(weight, keep, gram, grid, start, 2)
    same = []
    for row in range(len(weight)):
        begun = start[0][row], start[1][row]
        wanted, fitted = descend_plainly(
            weight[row].double(), keep[row], hessian, grid, begun, sweeps=2
        )
        same.append(bool(torch.equal(levels[row].double() * keep[row], wanted)))
        if same[-1]:
            torch.testing.assert_close(scales[row].double(), fitted, rtol=0.01, atol=0)
    assert sum(same) > len(weight) / 2
