"""The search for an order: what is kept never falls, and what can be kept is found."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from symprune import SympruneError
from symprune.masks import Pattern
from symprune.permute import choose_parts, order
from symprune.permute.assignment import assign
from symprune.permute.order import add_maxima, find_order, retained
from symprune.stats import GRAM, MOMENTS, SQUARE, ChannelStats

TWO_OF_FOUR = Pattern(2, 4)


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def uneven(rows: int, channels: int) -> torch.Tensor:
    """Scores whose channels differ in size."""
    generator = torch.Generator().manual_seed(1)
    size = torch.rand(channels, generator=generator) ** 3
    return torch.rand(rows, channels, generator=generator) * size


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_an_assignment_is_the_best_of_all(size: int) -> None:
    generator = np.random.default_rng(size)
    for number in range(20):
        gain = generator.random((size, size))
        if number % 2:  # many that are equal
            gain = generator.integers(0, 3, (size, size)).astype(float)
        found = assign(gain)
        assert sorted(found) == list(range(size))
        best = max(sum(gain[range(size), each]) for each in permutations(range(size)))
        assert gain[range(size), found].sum() == pytest.approx(best)


def test_a_large_assignment_has_prices_that_prove_it() -> None:
    """No two rows gain by changing columns, nor three in a circle."""
    gain = np.random.default_rng(0).random((60, 60))
    found = assign(gain)
    mine = gain[range(60), found]
    moved = gain[:, found] - mine[:, None]  # what row i gains with the column of row j
    assert (moved + moved.T <= 1e-12).all()
    rounds = moved[:, :, None] + moved[None, :, :] + moved.T[:, None, :]
    assert (rounds <= 1e-12).all()


def test_the_pattern_keeps_more_in_the_order_that_is_found() -> None:
    score = uneven(24, 64)
    found = find_order(score, TWO_OF_FOUR, draw())
    assert sorted(found.tolist()) == list(range(64))
    dealt = score.sum(0).argsort(descending=True).view(4, 16).T.flatten()
    kept = [retained(score[:, each], TWO_OF_FOUR) for each in (torch.arange(64), dealt, found)]
    assert kept[0] < kept[1] < kept[2]


def test_all_large_channels_are_kept_where_they_can_be() -> None:
    """Half the channels are large and stand together: 2:4 would lose half of them."""
    score = torch.ones(8, 32)
    score[:, :16] = 10
    assert retained(score, TWO_OF_FOUR) == 8 * (8 * 10 + 8)
    found = find_order(score, TWO_OF_FOUR, draw())
    assert retained(score[:, found], TWO_OF_FOUR) == 8 * 16 * 10


@pytest.mark.parametrize("pattern", [Pattern(1, 4), Pattern(4, 8), Pattern(3, 4)])
def test_other_patterns_keep_more_as_well(pattern: Pattern) -> None:
    score = uneven(12, 48)
    found = find_order(score, pattern, draw())
    assert retained(score[:, found], pattern) > retained(score, pattern)


def test_an_order_that_brings_nothing_is_not_taken() -> None:
    assert find_order(torch.ones(4, 16), TWO_OF_FOUR, draw()).tolist() == list(range(16))
    assert find_order(uneven(4, 4), TWO_OF_FOUR, draw()).tolist() == list(range(4))


def test_many_groups_are_assigned_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    score = uneven(24, 64)
    whole = retained(score[:, find_order(score, TWO_OF_FOUR, draw())], TWO_OF_FOUR)
    sizes: list[int] = []
    monkeypatch.setattr(order, "TOGETHER", 5)
    monkeypatch.setattr(order, "assign", lambda gain: sizes.append(len(gain)) or assign(gain))
    found = find_order(score, TWO_OF_FOUR, draw())
    assert max(sizes) <= 5 and sorted(found.tolist()) == list(range(64))
    kept = retained(score[:, found], TWO_OF_FOUR)
    assert retained(score, TWO_OF_FOUR) < kept < 1.01 * whole


@pytest.mark.parametrize("room", [1, 50, 2**20])
def test_sums_of_maxima_do_not_depend_on_the_pieces(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = uneven(21, 5), uneven(21, 7)
    monkeypatch.setattr(order, "CACHED", room)
    expected = torch.maximum(left.unsqueeze(2), right.unsqueeze(1)).sum(0)
    torch.testing.assert_close(add_maxima(left, right), expected)


def test_statistics_follow_their_channels() -> None:
    inputs = torch.randn(3, 40, 600, generator=draw())
    there = torch.randperm(600, generator=draw())
    known, moved = (ChannelStats(600, {SQUARE, MOMENTS, GRAM}) for _ in range(2))
    known.add(inputs)
    known.reorder(there)
    moved.add(inputs[..., there])
    for name in ("norm", "mean", "variance"):
        expected = getattr(moved, name)
        scale = float(expected.abs().max())
        torch.testing.assert_close(getattr(known, name), expected, rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(known.gram, moved.gram, rtol=1e-5, atol=1e-3)
    assert torch.equal(known.gram, known.gram.T)


def test_parts_are_given_as_a_list_or_with_commas() -> None:
    assert choose_parts(None) == ()
    assert choose_parts("heads, mlp") == choose_parts(["mlp", "heads", "mlp"]) == ("mlp", "heads")
    assert choose_parts("all") == ("mlp", "heads", "residual")
    with pytest.raises(SympruneError, match="permute must be one of mlp, heads"):
        choose_parts("attention")
    with pytest.raises(SympruneError, match="permute is a list of mlp, heads, residual, not 3"):
        choose_parts(3)  # type: ignore[arg-type]
