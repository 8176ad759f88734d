"""Statistics: the definitions, and that parts add up to the whole."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from symprune.errors import SympruneError
from symprune.stats import GRAM, MOMENTS, SQUARE, ChannelStats, limit_tokens

ALL = (SQUARE, MOMENTS, GRAM)


def measured(*batches: Tensor) -> ChannelStats:
    stats = ChannelStats(batches[0].shape[-1], ALL)
    for batch in batches:
        stats.add(batch)
    return stats


def assert_close(actual: Tensor, expected: Tensor, summed: Tensor) -> None:
    """Up to roundings of `summed`, the size of what was added up: a sum near zero has no more
    digits than its terms."""
    roundings = 16 * torch.finfo(torch.float32).eps
    assert ((actual.double() - expected.double()).abs() <= roundings * summed.double()).all()


def assert_same(left: ChannelStats, right: ChannelStats) -> None:
    assert (left.samples, left.tokens) == (right.samples, right.tokens)
    norm, length = right.norm.double(), right.tokens / right.samples
    assert_close(left.norm, right.norm, norm)
    assert_close(left.mean, right.mean, norm * length**0.5)  # sum |x| <= ||x|| root of the length
    assert_close(left.variance, right.variance, right.variance)
    assert_close(left.gram, right.gram, torch.outer(norm, norm) * right.samples)


def test_the_statistics_are_their_definitions(device: torch.device) -> None:
    x = torch.randn(5, 11, 6, device=device) + 0.5
    stats = ChannelStats(6, ALL, device=device)
    stats.add(x)
    wide = x.double()
    norm, variance = (wide**2).sum(1).mean(0).sqrt(), wide.var(1, correction=0).mean(0)
    assert_close(stats.norm, norm, norm)
    assert_close(stats.mean, wide.sum(1).mean(0), wide.abs().sum(1).mean(0))
    assert_close(stats.variance, variance, variance)
    flat = wide.reshape(-1, 6)
    norm = flat.norm(dim=0)
    assert_close(stats.gram, flat.T @ flat, torch.outer(norm, norm))


def test_variance_weighs_samples_by_their_tokens() -> None:
    short, long = torch.randn(1, 3, 4), torch.randn(1, 30, 4)
    expected = (3 * short[0].var(0, correction=0) + 30 * long[0].var(0, correction=0)) / 33
    torch.testing.assert_close(measured(short, long).variance, expected)


@pytest.mark.parametrize("mean", [0.0, 1.0, 1000.0, -30_000.0])
def test_a_large_mean_does_not_drown_the_variance(mean: float) -> None:
    """As fp32 holds the numbers: what their own rounding does to the variance is no fault."""
    x = (mean + torch.randn(3, 700, 5) * torch.tensor([0.01, 0.1, 1, 10, 100])).float()
    expected = x.double().var(1, correction=0).mean(0)
    assert_close(measured(x).variance, expected, expected)
    assert torch.equal(measured(torch.full((2, 9, 4), mean)).variance, torch.zeros(4))


def test_the_variance_of_a_long_sample_is_summed_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(2, 50, 6) + 100
    monkeypatch.setattr("symprune.stats.PIECE", 6 * 8)  # the sample in seven pieces
    expected = x.double().var(1, correction=0).mean(0)
    assert_close(measured(x).variance, expected, expected)


@given(st.integers(2, 6), st.integers(0, 1000), st.data())
def test_batches_and_splits_do_not_show(samples: int, seed: int, data: st.DataObject) -> None:
    x = torch.randn(samples, 7, 3, generator=torch.Generator().manual_seed(seed))
    cut = data.draw(st.integers(1, samples - 1))
    whole = measured(x)
    assert_same(measured(*x.split(1)), whole)
    left, right = measured(x[:cut]), measured(x[cut:])
    left.merge(right)
    assert_same(left, whole)


def test_order_and_splits_do_not_change_one_bit() -> None:
    """A sample is summed alone, so always alike, and sums of samples are exact: two doubles hold
    all their bits."""
    x = torch.randn(64, 17, 128) * torch.logspace(-6, 6, 64)[torch.randperm(64)].view(-1, 1, 1)
    thirds = [measured(part) for part in x.split((5, 40, 19))]
    for part in thirds[:0:-1]:
        thirds[0].merge(part)
    for other in (measured(*x.flip(0).split(1)), thirds[0]):
        for name in ("norm", "mean", "variance"):
            assert torch.equal(getattr(measured(*x.split(1)), name), getattr(other, name)), name


def test_a_sum_is_exact_where_double_precision_is_not() -> None:
    x = torch.tensor([1.0, 1e-4, 1e5]).view(3, 1, 1)
    exact = Fraction(0)
    for value in x.flatten():
        exact += Fraction(float(value * value))
    stats = measured(x)
    assert Fraction(float(stats.sums["square"])) + Fraction(float(stats.rests["square"])) == exact
    assert Fraction(float(stats.sums["square"])) != exact


def test_number_of_threads_does_not_show() -> None:
    x = torch.randn(2, 512, 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = measured(x)
        torch.set_num_threads(2)
        assert_same(measured(x), one)
    finally:
        torch.set_num_threads(before)


def test_half_precision_is_summed_in_fp32() -> None:
    x = torch.full((1, 4096, 2), 0.1, dtype=torch.float16)
    exact = (x[0].double() ** 2).sum(0).sqrt().float()
    torch.testing.assert_close(measured(x).norm, exact, rtol=1e-5, atol=0)


def test_state_goes_over_a_wire_and_back() -> None:
    stats = measured(torch.randn(3, 5, 4))
    copy = ChannelStats(4, ALL)
    copy.load({name: value.clone() for name, value in stats.state().items()})
    assert_same(copy, stats)


def test_only_what_is_asked_for_is_kept() -> None:
    assert set(ChannelStats(4).sums) == {"square"}
    assert set(ChannelStats(4, []).sums) == set()
    with pytest.raises(SympruneError, match="Unknown statistic"):
        ChannelStats(4, ["median"])


def test_mismatches_and_non_finite_values_are_noticed() -> None:
    stats = ChannelStats(4)
    with pytest.raises(SympruneError, match="Expected 4 channels, got 5"):
        stats.add(torch.ones(2, 5))
    with pytest.raises(SympruneError, match="same channels"):
        stats.merge(ChannelStats(5))
    stats.add(torch.ones(2, 4))
    assert stats.is_finite()
    stats.add(torch.full((2, 4), torch.inf))
    assert not stats.is_finite()


def test_an_empty_batch_adds_nothing() -> None:
    stats = ChannelStats(4)
    stats.add(torch.ones(0, 4))
    assert (stats.samples, stats.tokens) == (0, 0)


@pytest.mark.parametrize("where", ["auto", "disk"])
def test_a_wide_gram_added_in_stripes_is_symmetric_and_right(where: str) -> None:
    x = torch.randn(3, 40, 700)
    stats = ChannelStats(700, [GRAM], gram_device=where)
    for sample in x:
        stats.add(sample)
        assert torch.equal(stats.gram, stats.gram.T)
    flat = x.reshape(-1, 700).double()
    norm = flat.norm(dim=0)
    assert_close(stats.gram, flat.T @ flat, torch.outer(norm, norm))


def test_a_limit_shortens_long_tokens_and_leaves_the_others(device: torch.device) -> None:
    x = torch.nn.functional.normalize(torch.randn(3, 9, 6, device=device), dim=-1)
    x[0, 0] *= 500
    x[1, 4] *= 1.9
    bounded = limit_tokens(x, 2.0)
    assert torch.equal(bounded[1:], x[1:]) and torch.equal(bounded[0, 1:], x[0, 1:])
    torch.testing.assert_close(bounded[0, 0].norm(), torch.tensor(2.0, device=device))
    torch.testing.assert_close(bounded[0, 0] * 250, x[0, 0])


def test_a_limit_is_each_samples_own_and_knows_empty_and_broken_tokens() -> None:
    x = torch.randn(2, 5, 4)
    x[1] *= 100
    torch.testing.assert_close(limit_tokens(x, 1.5)[1], limit_tokens(x[1:], 1.5)[0])
    zeros = torch.zeros(1, 5, 4)
    zeros[0, 2] = 1.0
    assert torch.equal(limit_tokens(zeros, 2.0), zeros)
    assert limit_tokens(torch.zeros(0, 4), 2.0).shape == (0, 4)
    assert limit_tokens(torch.full((1, 3, 4), float("inf")), 2.0).isfinite().sum() == 0
    x[0, 3, 1] = float("nan")
    assert limit_tokens(x, 2.0)[0, 3].isnan().any()


def test_a_samples_sum_of_squares_is_an_fp32_number_however_long_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(2, 50, 6)
    whole = measured(x).sums[SQUARE]
    monkeypatch.setattr("symprune.stats.PIECE", 6 * 8)  # the sample in seven pieces
    first = measured(x[:1]).sums[SQUARE]
    assert torch.equal(first, first.float().double())
    torch.testing.assert_close(measured(x).sums[SQUARE], whole, rtol=1e-6, atol=0)


def exact(stats: ChannelStats) -> list[Fraction]:
    """The sums of squares with what their roundings lost."""
    pairs = zip(stats.sums[SQUARE].tolist(), stats.rests[SQUARE].tolist(), strict=True)
    return [Fraction(value) + Fraction(rest) for value, rest in pairs]


def large_and_small() -> ChannelStats:
    """Two samples whose squares, 2^54 and 1, do not fit into one double together."""
    stats = ChannelStats(1)
    for value in (2.0**27, 1.0):
        stats.add(torch.full((1, 1), value))
    assert exact(stats) == [2**54 + 1] and float(stats.sums[SQUARE]) == 2**54
    return stats


def test_parts_that_are_merged_bring_what_their_roundings_lost() -> None:
    stats = large_and_small()
    stats.merge(large_and_small())
    assert exact(stats) == [2 * (2**54 + 1)]


def test_statistics_that_travel_bring_what_their_roundings_lost() -> None:
    arrived = ChannelStats(1)
    arrived.load(large_and_small().state())
    assert exact(arrived) == [2**54 + 1]


def test_processes_that_add_up_bring_what_their_roundings_lost() -> None:
    stats = large_and_small()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stats.all_reduce()
    finally:
        dist.destroy_process_group()
    assert exact(stats) == [2**54 + 1] and (stats.samples, stats.tokens) == (2, 2)
