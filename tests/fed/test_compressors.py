"""Compressors keep their promises: the constants by Monte-Carlo, the identities exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.compressors import (
    QSGD,
    Chain,
    Comp,
    Compressor,
    Identity,
    Mix,
    Natural,
    RandK,
    Scaled,
    TopK,
    WholeNumbers,
    parse,
)
from symprune.fed.participation import Nice
from symprune.fed.randomness import Stream

D, DRAWS = 20, 20_000


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    spiky = torch.full((D,), 1e-3, dtype=torch.float64)
    spiky[4] = 1.0
    return {
        "flat": torch.ones(D, dtype=torch.float64),
        "gaussian": torch.randn(D, generator=generator, dtype=torch.float64),
        "spiky": spiky,
    }


def measure(compressor: Compressor, x: Tensor) -> tuple[float, float, float]:
    """Relative bias, variance and second moment over many draws."""
    y = compressor.compress(x.expand(DRAWS, D).contiguous(), torch.Generator().manual_seed(1))
    mean, norm = y.mean(0), x.norm()
    variance = (y - mean).square().sum(1).mean() / norm**2
    return (
        float((mean - x).norm() / norm),
        float(variance),
        float(y.norm(dim=1).square().mean() / norm**2),
    )


ALL = [
    Identity(),
    TopK(5),
    RandK(5),
    RandK(5, scaled=True),
    Mix(3, 4),
    Comp(2, 10),
    Natural(),
    QSGD(2),
    QSGD(8),
    Scaled(RandK(5)),
    Scaled(Comp(1, 10)),
    Chain(TopK(5), Natural()),
    Chain(RandK(5), QSGD(4)),
    Chain(Comp(2, 10), Natural()),
    WholeNumbers(8),
    WholeNumbers(4),
    Chain(TopK(5), WholeNumbers(4)),
    Chain(RandK(5), WholeNumbers(8)),
]


@pytest.mark.parametrize("compressor", ALL, ids=str)
def test_bias_and_variance_stay_within_the_constants(compressor: Compressor) -> None:
    constants = compressor.constants(D)
    for x in inputs().values():
        bias, variance, moment = measure(compressor, x)
        noise = 4 * math.sqrt(constants.omega / DRAWS) * 2
        assert bias <= constants.eta + noise + 1e-12
        assert variance <= constants.omega * 1.03 + 1e-12
        assert moment <= constants.moment * 1.03 + 1e-12
        if constants.alpha is not None:
            assert bias**2 + variance <= (1 - constants.alpha) * 1.03 + noise + 1e-12


@pytest.mark.parametrize("compressor", [TopK(5), RandK(5, scaled=True), Mix(3, 4)], ids=str)
def test_a_flat_vector_attains_the_constants(compressor: Compressor) -> None:
    constants = compressor.constants(D)
    bias, variance, _ = measure(compressor, inputs()["flat"])
    assert bias == pytest.approx(constants.eta, abs=0.01)
    assert variance == pytest.approx(constants.omega, rel=0.02, abs=1e-12)


def test_the_constants_are_those_of_the_table() -> None:
    mix = Mix(3, 4).constants(D)
    assert mix.eta == pytest.approx(0.7050, abs=1e-4) and mix.omega == pytest.approx(
        0.1529, abs=1e-4
    )
    assert TopK(5).constants(D).alpha == pytest.approx(0.25)
    assert Scaled(RandK(5)).constants(D).alpha == pytest.approx(0.25)
    assert RandK(5).constants(D).best_scaling == pytest.approx(0.25)
    assert Comp(1, 10).constants(D).alpha is None
    assert TopK(5).constants(D).best_scaling == 1


def test_comp_joins_top_k_and_rand_k() -> None:
    x = torch.randn(50, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draw = lambda c: c.compress(x, torch.Generator().manual_seed(3))  # noqa: E731
    assert torch.equal(draw(Comp(4, 4)), draw(TopK(4)))
    assert torch.equal(draw(Comp(4, D)), draw(RandK(4)))
    assert torch.equal(draw(Mix(6, D - 6)), x)
    assert torch.allclose(draw(RandK(5)) * (5 / D), draw(RandK(5, scaled=True)))


def test_independent_workers_average_the_variance_down() -> None:
    n, draws = 12, 4000
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    stack = x.repeat(draws, 1)
    comp = Comp(2, 10)
    y = comp.compress(stack, torch.Generator().manual_seed(1)).view(draws, n, D)
    mean = y.mean(1)
    variance = (mean - mean.mean(0)).square().sum(1).mean()
    assert variance <= comp.constants(D).omega / n * x.square().sum(1).mean() * 1.03


def test_nice_participation_has_the_variance_of_its_formula() -> None:
    n, m = 10, 3
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x -= x.mean(0)
    nice, generator = Nice(m, n), torch.Generator().manual_seed(1)
    means = torch.stack([nice.compress(x, generator).mean(0) for _ in range(3000)])
    variance = float(means.var(0, unbiased=False).sum() / x.square().sum(1).mean())
    assert variance == pytest.approx(nice.omega_average, rel=0.06)
    assert Nice(4, 4).omega_average == 0 and Nice(1, 1).omega == 0


def test_participation_after_compression_stays_within_its_constants() -> None:
    n, m, draws = 8, 3, 1500
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nice, comp, generator = Nice(m, n), Comp(2, 10), torch.Generator().manual_seed(1)
    constants, average = nice.after(comp.constants(D))
    y = torch.stack([nice.compress(comp.compress(x, generator), generator) for _ in range(draws)])
    mean = y.mean(1)
    assert (mean - mean.mean(0)).square().sum(1).mean() <= average * x.square().sum(1).mean()
    per_worker = (y - y.mean(0)).square().sum(2).mean(0) / x.square().sum(1)
    assert per_worker.max() <= constants.omega


def test_a_row_gets_the_same_numbers_alone_as_in_a_stack() -> None:
    x = torch.randn(6, D, generator=torch.Generator().manual_seed(0))
    everyone = RandK(3).compress(x, Stream.of(7, 2, "compress", torch.arange(6)))
    alone = RandK(3).compress(x[4:5], Stream.of(7, 2, "compress", torch.tensor([4])))
    assert torch.equal(everyone[4:5], alone)
    later = RandK(3).compress(x, Stream.of(7, 3, "compress", torch.arange(6)))
    assert not torch.equal(everyone, later)


def test_streams_are_uniform_and_uncorrelated() -> None:
    u = Stream.of(0, 0, "test", torch.arange(200)).uniform(500)
    assert abs(float(u.mean()) - 0.5) < 0.005 and abs(float(u.var()) - 1 / 12) < 0.002
    centred = u - 0.5
    neighbours = (centred[1:] * centred[:-1]).mean() * 12
    assert abs(float(neighbours)) < 0.015
    z = Stream.of(1, 0, "test", torch.arange(200)).normal(500)
    assert abs(float(z.mean())) < 0.015 and abs(float(z.var()) - 1) < 0.03


def test_names_are_read_and_nonsense_is_named() -> None:
    assert parse("comp:1,15") == Comp(1, 15)
    assert parse("top-k:10+natural") == Chain(TopK(10), Natural())
    for text, culprit in [("best-k:3", "best-k"), ("top-k:x", "top-k:x"), ("mix:3", "mix")]:
        with pytest.raises(SympruneError, match=culprit):
            parse(text)
    with pytest.raises(SympruneError, match=r"outside 1\.\.20"):
        TopK(21).compress(torch.ones(20), torch.Generator())
