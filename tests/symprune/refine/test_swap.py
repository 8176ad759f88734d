"""Exact swaps against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from symprune import masks
from symprune.errors import SympruneError
from symprune.masks import Pattern
from symprune.refine.swap import Swap, swap
from symprune.stats import GRAM, ChannelStats


def problem(rows: int, columns: int, tokens: int = 200, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A weight and correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator)
    x = torch.randn(tokens, columns, generator=generator) @ mix
    return torch.randn(rows, columns, generator=generator), x


def row_errors(x: Tensor, weight: Tensor, keep: Tensor) -> Tensor:
    return (x.double() @ (weight * ~keep).double().T).square().sum(0)


def test_one_swap_is_the_best_of_all() -> None:
    weight, x = problem(6, 10)
    keep = masks.keep_by_row(weight.abs(), 0.5)
    got = swap(weight, keep, x.T @ x, max_swaps=1, candidates=10)
    for row in range(6):
        pruned = (~keep[row]).nonzero().flatten().tolist()
        kept = keep[row].nonzero().flatten().tolist()
        best, found = float(row_errors(x, weight, keep)[row]), keep[row]
        for g, q in itertools.product(pruned, kept):
            tried = keep.clone()
            tried[row, g], tried[row, q] = True, False
            error = float(row_errors(x, weight, tried)[row])
            if error < best * (1 - 1e-5):
                best, found = error, tried[row]
        assert torch.equal(got[row], found)


def test_one_swap_inside_a_group_is_the_best_of_all() -> None:
    weight, x = problem(5, 12)
    pattern = Pattern(2, 4)
    keep = masks.keep_n_of_m(weight.abs(), pattern)
    got = swap(weight, keep, x.T @ x, max_swaps=1, pattern=pattern)
    for row in range(5):
        best, found = float(row_errors(x, weight, keep)[row]), keep[row]
        for g, q in itertools.product(range(12), range(12)):
            if g // 4 == q // 4 and not keep[row, g] and keep[row, q]:
                tried = keep.clone()
                tried[row, g], tried[row, q] = True, False
                error = float(row_errors(x, weight, tried)[row])
                if error < best * (1 - 1e-5):
                    best, found = error, tried[row]
        assert torch.equal(got[row], found)


@pytest.mark.parametrize("pattern", [None, Pattern(2, 4), Pattern(4, 8)])
@pytest.mark.parametrize("tokens", [400, 20])
def test_the_error_never_rises_and_counts_stay(pattern: Pattern | None, tokens: int) -> None:
    """Also with fewer tokens than channels, where G is singular."""
    weight, x = problem(24, 48, tokens)
    score = weight.abs() * x.norm(dim=0)
    keep = masks.keep_mask(score, 0.5, group="layer" if pattern is None else "row", pattern=pattern)
    size = 48 if pattern is None else pattern.m
    before, errors = keep, [row_errors(x, weight, keep)]
    for _ in range(12):
        before = swap(weight, before, x.T @ x, max_swaps=1, pattern=pattern)
        errors.append(row_errors(x, weight, before))
        assert torch.equal(before.view(-1, size).sum(1), keep.view(-1, size).sum(1))
        assert (errors[-1] <= errors[-2] * (1 + 1e-6)).all()
    assert errors[-1].sum() < 0.9 * errors[0].sum()
    together = swap(weight, keep, x.T @ x, max_swaps=12, pattern=pattern)
    assert torch.equal(together.view(-1, size).sum(1), keep.view(-1, size).sum(1))
    assert (row_errors(x, weight, together) <= errors[0] * (1 + 1e-6)).all()
    assert row_errors(x, weight, together).sum() < 1.1 * errors[-1].sum()


@pytest.mark.parametrize("pattern", [None, Pattern(2, 4), Pattern(1, 4), Pattern(4, 8)])
def test_rows_in_parts_give_what_rows_together_give(pattern: Pattern | None) -> None:
    """The masks, not the sums behind them: those may be rounded otherwise in a product of another
    shape, but among so few weights no two swaps are that close."""
    weight, x = problem(600, 16)
    keep = masks.keep_mask(weight.abs(), 0.5, pattern=pattern)
    gram = x.T @ x
    parts = zip(weight.split(100), keep.split(100), strict=True)
    apart = torch.cat([swap(w, k, gram, pattern=pattern) for w, k in parts])
    assert torch.equal(apart, swap(weight, keep, gram, pattern=pattern))


@pytest.mark.parametrize("pattern", [None, Pattern(2, 4), Pattern(1, 4), Pattern(4, 8)])
def test_rows_stop_where_no_swap_lowers_the_error(pattern: Pattern | None) -> None:
    weight, x = problem(7, 16)
    keep = masks.keep_mask(weight.abs(), 0.5, pattern=pattern)
    got = swap(weight, keep, x.T @ x, max_swaps=400, candidates=16, pattern=pattern)
    size = 16 if pattern is None else pattern.m
    assert torch.equal(got.view(-1, size).sum(1), keep.view(-1, size).sum(1))
    least = row_errors(x, weight, got)
    for row, g, q in itertools.product(range(7), range(16), range(16)):
        inside = pattern is None or g // pattern.m == q // pattern.m
        if inside and not got[row, g] and got[row, q]:
            tried = got.clone()
            tried[row, g], tried[row, q] = True, False
            assert row_errors(x, weight, tried)[row] > least[row] * (1 - 1e-4)


def test_nothing_pruned_or_everything_leaves_nothing_to_swap() -> None:
    weight, x = problem(3, 8)
    for keep in (torch.ones(3, 8, dtype=torch.bool), torch.zeros(3, 8, dtype=torch.bool)):
        assert torch.equal(swap(weight, keep, x.T @ x), keep)


def test_a_mask_that_does_not_follow_the_pattern_is_refused() -> None:
    weight, x = problem(3, 8)
    keep = torch.tensor([True, True, True, False, True, False, False, False]).expand(3, 8)
    with pytest.raises(SympruneError, match="does not keep 2:4 everywhere"):
        swap(weight, keep, x.T @ x, pattern=Pattern(2, 4))


def test_dead_channels_are_given_up_for_living_ones() -> None:
    weight, _ = problem(4, 8)
    x = torch.eye(8)
    x[:, :4] = 0
    keep = torch.tensor([True] * 4 + [False] * 4).expand(4, 8)
    got = swap(weight, keep, x.T @ x)
    assert torch.equal(got, ~keep)
    assert float(row_errors(x, weight, got).sum()) == 0


@pytest.mark.parametrize("pattern", [None, Pattern(2, 4)])
def test_with_shrinking_neither_error_rises(pattern: Pattern | None) -> None:
    weight, x = problem(24, 48, 60)
    gram, shrink = x.T @ x, 0.8
    keep = masks.keep_mask(weight.abs() * x.norm(dim=0), 0.5, pattern=pattern)

    def shrunk_errors(mask: Tensor) -> Tensor:
        lost = (weight * ~mask).double()
        return row_errors(x, weight, mask) + shrink * lost.square() @ gram.diagonal().double()

    for _ in range(8):
        after = swap(weight, keep, gram, max_swaps=1, shrink=shrink, pattern=pattern)
        assert (row_errors(x, weight, after) <= row_errors(x, weight, keep) * (1 + 1e-6)).all()
        assert (shrunk_errors(after) <= shrunk_errors(keep) * (1 + 1e-6)).all()
        keep = after


def test_shrinking_helps_on_other_tokens() -> None:
    weight, x = problem(64, 48, 4096)
    x = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) + 0.1 * x
    keep = masks.keep_by_row(weight.abs() * x.norm(dim=0), 0.5)
    few, others = x[:96], x[96:]
    plain, shrunk = (
        row_errors(others, weight, swap(weight, keep, few.T @ few, shrink=shrink)).sum()
        for shrink in (0.0, 2 * 48 / 96)
    )
    assert shrunk < plain


@pytest.mark.parametrize("pattern", [None, Pattern(2, 4)], ids=str)
@pytest.mark.parametrize("most", [1, 2, 3, 5, 6])
def test_no_row_makes_more_swaps_than_it_may(most: int, pattern: Pattern | None) -> None:
    weight, x = problem(6, 48)
    score = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1))
    keep = masks.keep_mask(score, 0.5, pattern=pattern)
    got = swap(weight, keep, x.T @ x, max_swaps=most, candidates=8, pattern=pattern)
    grown = (got & ~keep).sum(1)
    assert grown.max() == most and torch.equal(grown, (keep & ~got).sum(1))


def changes(
    weight: Tensor, keep: Tensor, gram: Tensor, shrink: float, g: int, q: int
) -> tuple[float, float]:
    """What swapping g for q changes of a row's d^T G d, and of d^T (G + shrink diag G) d."""
    shrunk, found = gram + shrink * gram.diagonal().diag(), []
    after = keep.clone()
    after[g], after[q] = True, False
    for matrix in (gram, shrunk):
        before, then = ((weight * ~mask).double() for mask in (keep, after))
        found.append(float(then @ matrix @ then - before @ matrix @ before))
    return found[0], found[1]


@pytest.mark.parametrize("pattern", [None, Pattern(2, 4)], ids=str)
@pytest.mark.parametrize("shrink", [0.3, 2.0])
def test_where_correlations_are_distrusted_a_swap_is_worth_the_lesser_of_two_errors(
    shrink: float, pattern: Pattern | None
) -> None:
    """Of every pair the fall that is smaller counts. In a group the pair is the one that the
    distrusting error prefers."""
    weight, x = problem(16, 12)
    gram = (x.T @ x).double()
    keep = masks.keep_mask(weight.abs(), 0.5, pattern=pattern)
    got = swap(
        weight, keep, gram.float(), max_swaps=1, candidates=12, shrink=shrink, pattern=pattern
    )
    moved = 0
    for row in range(16):
        groups = [range(12)] if pattern is None else [range(at, at + 4) for at in (0, 4, 8)]
        offers = []
        for group in groups:
            pairs = [(g, q) for g in group for q in group if keep[row, q] and not keep[row, g]]
            both = {p: changes(weight[row], keep[row], gram, shrink, *p) for p in pairs}
            if pattern is None:
                offers += [(max(found), pair) for pair, found in both.items()]
            else:
                pair = min(both, key=lambda p: both[p][1])
                offers.append((max(both[pair]), pair))
        fall, (g, q) = min(offers)
        expected = keep[row].clone()
        if fall < 0:
            expected[g], expected[q] = True, False
            moved += 1
        assert torch.equal(got[row], expected)
    assert 0 < moved < 16


def test_the_option_shrink_counts_in_units_of_channels_per_token() -> None:
    weight, x = problem(16, 24, tokens=48)
    stats = ChannelStats(24, {GRAM})
    stats.add(x.unsqueeze(0))
    keep = masks.keep_by_row(weight.abs(), 0.5)
    got = Swap(shrink=3.0)(weight, keep, stats, None, "magnitude")
    assert torch.equal(got, swap(weight, keep, stats.gram, shrink=3.0 * 24 / 48))
    assert not torch.equal(got, swap(weight, keep, stats.gram))
