"""Gram matrices: what they are, and that order and splits do not change one bit."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from symprune import gram
from symprune.gram import GramSum, memory_of, scale_of


def added(samples: Tensor, scale: Tensor | None = None, where: str = "cpu") -> GramSum:
    total = GramSum(samples.shape[-1], where, scale)
    for sample in samples:
        total.add(sample)
    return total


def uneven(samples: int, channels: int, seed: int = 0) -> Tensor:
    """Samples and channels whose sizes differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 9, channels, generator=generator)
    x *= torch.logspace(-4, 4, channels)[torch.randperm(channels, generator=generator)]
    return (
        x * torch.logspace(-1, 1, samples)[torch.randperm(samples, generator=generator), None, None]
    )


@pytest.mark.parametrize("channels", [5, 300, 700])  # one stripe, one, two of 350
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_order_and_splits_do_not_change_one_bit(channels: int, where: str) -> None:
    x = uneven(11, channels)
    scale, whole = scale_of(x[0]), added(x, where=where).whole()
    parts = [added(part, scale, where) for part in x.split((3, 7, 1))]
    for part in parts[:0:-1]:
        parts[0].merge(part)
    assert torch.equal(parts[0].whole(), whole)
    assert torch.equal(added(x.flip(0), scale, where).whole(), whole)


def test_order_does_not_show_in_the_rests_either() -> None:
    """Products of samples much smaller than the first have digits below all that is kept; left in,
    they would be cut off differently in every order, and now and then that shows in the result."""
    x = uneven(12, 40) * torch.logspace(0, -5, 12)[:, None, None]
    scale = scale_of(x[0])
    forth, back = added(x, scale).state(), added(x.flip(0), scale).state()
    assert torch.equal(forth["gram"], back["gram"])
    assert torch.equal(forth["gram_rest"], back["gram_rest"])


def test_in_fp32_order_and_splits_do_change_bits() -> None:
    """So the tests here could fail."""
    x = uneven(11, 300)
    forth, back = (sum(sample.T @ sample for sample in samples) for samples in (x, x.flip(0)))
    assert not torch.equal(torch.as_tensor(forth), torch.as_tensor(back))


def test_a_sum_is_the_rounded_one_of_the_samples_rounded_products() -> None:
    x = uneven(6, 3)
    scale = scale_of(x[0])
    found = added(x).whole()
    for i in range(3):
        for j in range(3):
            unit = Fraction(float(scale[i] * scale[j])) / 2**gram.DIGITS
            products = [Fraction(float((sample.T @ sample)[i, j])) for sample in x]
            exact = sum(round(product / unit) * unit for product in products)
            assert float(found[min(i, j), max(i, j)]) == float(torch.tensor(float(exact)).float())


def test_rounding_takes_nothing_an_fp32_product_has_right() -> None:
    x = uneven(40, 64)
    flat = x.reshape(-1, 64).double()
    norm = flat.norm(dim=0)
    wrong = (added(x).whole().double() - flat.T @ flat).abs() / torch.outer(norm, norm)
    assert wrong.max() <= 16 * torch.finfo(torch.float32).eps


def test_a_channel_the_first_sample_does_not_know_is_not_rounded() -> None:
    x = torch.randn(4, 9, 6, generator=torch.Generator().manual_seed(0)) * 1e-12
    x[0] = 0
    x[0, :, 0] = 1e6
    flat = x.reshape(-1, 6).double()
    found = added(x).whole().double()
    torch.testing.assert_close(
        found[1:, 1:],
        (flat.T @ flat)[1:, 1:],
        rtol=1e-4,
        atol=1e-6 * float(flat[:, 1:].square().sum()),
    )


def test_a_sum_goes_on_after_it_was_looked_at() -> None:
    x = uneven(4, 700)
    looked_at = added(x[:2])
    looked_at.whole()
    for sample in x[2:]:
        looked_at.add(sample)
    found, expected = looked_at.whole(), added(x).whole()
    assert torch.equal(found, found.T)
    norm = x.flatten(0, 1).norm(dim=0)
    assert ((found - expected).abs() <= 1e-6 * torch.outer(norm, norm)).all()
    copy = GramSum(700, "cpu")
    copy.load(looked_at.state())
    copy.add(torch.zeros(1, 700))
    assert torch.equal(copy.whole(), found)


def test_a_scale_is_a_power_of_two_from_the_norm_to_twice_that() -> None:
    x = uneven(1, 50)[0]
    x[:, 7] = 0
    scale, norm = scale_of(x), x.norm(dim=0).double()
    assert scale[7] == 0
    known = scale > 0
    assert (torch.frexp(scale[known]).mantissa == 0.5).all() and known.sum() == 49
    assert (scale >= norm * (1 - 1e-6)).all() and (scale <= 2 * norm * (1 + 1e-6)).all()


@pytest.mark.parametrize("channels", [5, 300, 700, 4096])
def test_the_rests_take_hardly_any_memory(channels: int) -> None:
    total = GramSum(channels, "cpu")
    held = 4 * (total.matrix.numel() + total.corner.numel())
    assert memory_of(channels) == held <= 8 * channels**2
    if channels >= 2048:
        assert held <= 1.13 * 4 * channels**2
