"""Noise over whole numbers: its distribution, its sensitivity, and where it is drawn from."""

from __future__ import annotations

import ast
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import symprune.fed.pruning.remote as remote
from symprune.errors import SympruneError
from symprune.fed import mechanism
from symprune.fed.mechanism import (
    UNITS,
    clip_to_whole,
    coins,
    deviation,
    discrete_gaussian,
    discrete_laplace,
    release,
    seeded_draw,
    system_draw,
)
from symprune.fed.randomness import Stream, SystemStream


def expected(sigma: int, reach: int) -> np.ndarray:
    n = np.arange(-60 * sigma, 60 * sigma + 1)
    weight = np.exp(-(n**2) / (2 * sigma**2))
    middle = len(n) // 2
    return np.asarray((weight / weight.sum())[middle - reach : middle + reach + 1])


@pytest.mark.parametrize("sigma", [1, 2, 7])
def test_every_number_comes_as_often_as_the_discrete_gaussian_says(sigma: int) -> None:
    count, reach = 200_000, 2 * sigma
    drawn = discrete_gaussian(sigma, count, seeded_draw(3))
    assert len(drawn) == count
    often = np.array([(drawn == n).mean() for n in range(-reach, reach + 1)])
    chance = expected(sigma, reach)
    assert (np.abs(often - chance) < 5 * np.sqrt(chance / count)).all()


def test_the_laplace_proposal_is_exact_and_knows_one_zero() -> None:
    drawn = discrete_laplace(3, 200_000, seeded_draw(5))
    ratio = math.exp(-1 / 3)
    chance = [(1 - ratio) / (1 + ratio) * ratio ** abs(n) for n in range(-4, 5)]
    often = [float((drawn == n).mean()) for n in range(-4, 5)]
    assert often == pytest.approx(chance, rel=0.03)


def test_large_deviations_have_the_moments_of_a_gaussian() -> None:
    sigma = 1 << 30
    drawn = discrete_gaussian(sigma, 100_000, seeded_draw(0)) / sigma
    assert float(drawn.std()) == pytest.approx(1, rel=0.01)
    assert abs(float(drawn.mean())) < 0.02
    assert float((drawn**4).mean()) == pytest.approx(3, rel=0.05)


def test_coins_that_a_double_cannot_decide_are_decided_with_more_digits() -> None:
    """With every coin in doubt, the exact decision gives the same heads."""
    above = np.arange(1, 400)
    quick = coins(above, 100, seeded_draw(9))
    slow = coins(above, 100, _first(seeded_draw(9), seeded_draw(1)), doubt=2.0)
    assert np.array_equal(quick, slow)


def _first(first: mechanism.Draw, later: mechanism.Draw) -> mechanism.Draw:
    waiting = [first]
    return lambda count: (waiting.pop() if waiting else later)(count)


def test_a_tie_of_64_bits_is_broken_by_fresh_ones() -> None:
    from decimal import Decimal, localcontext

    with localcontext() as context:
        context.prec = 60
        prefix = int(Decimal(-1).exp() * 2**64)
    low = mechanism._decide(Fraction(1), prefix, lambda count: np.zeros(count, np.uint64))
    high = mechanism._decide(Fraction(1), prefix, lambda n: np.full(n, 2**64 - 1, np.uint64))
    assert low and not high


@pytest.mark.parametrize("size", [0.0, 1e-200, 0.3, 1.0, 1e10, 1e300, math.inf])
def test_a_clipped_row_is_never_longer_than_the_noise_is_made_for(size: float) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(5, 999, dtype=torch.float64, generator=generator)
    rows = rows / rows.norm(dim=1, keepdim=True) * size
    whole = clip_to_whole(rows)
    assert all(sum(n * n for n in row) <= UNITS**2 for row in whole.tolist())
    if 1 <= size < math.inf:
        assert float(whole[0].double().norm()) > 0.999 * UNITS


def test_what_fits_is_not_scaled() -> None:
    row = torch.tensor([[0.25, -0.5, 0.0]])
    assert torch.allclose(clip_to_whole(row).double() / UNITS, row.double(), atol=1e-6)


def test_a_release_is_whole_numbers_with_the_promised_deviation() -> None:
    noisy = release(torch.zeros(20_000, dtype=torch.int64), 2.5, seeded_draw(0))
    assert noisy.dtype == torch.int64
    assert float(noisy.double().std()) == pytest.approx(2.5 * UNITS, rel=0.02)
    assert deviation(2.5) > 2.5 * UNITS


@pytest.mark.parametrize("multiplier", [0.0, -1.0, math.inf, math.nan, 1e9])
def test_noise_that_is_none_is_refused(multiplier: float) -> None:
    with pytest.raises(SympruneError, match="noise multiplier"):
        release(torch.zeros(3, dtype=torch.int64), multiplier)


def test_system_noise_is_fresh_and_seeded_noise_repeats() -> None:
    assert not np.array_equal(system_draw(8), system_draw(8))
    assert np.array_equal(seeded_draw(4)(8), seeded_draw(4)(8))
    assert not torch.equal(SystemStream(2).uniform(5), SystemStream(2).uniform(5))


def test_a_row_alone_draws_what_it_draws_in_a_stack() -> None:
    together = Stream.of(1, 2, "noise", torch.arange(3))
    alone = Stream.of(1, 2, "noise", torch.arange(3)).by_row()
    whole = together.bits(6)
    assert all(np.array_equal(whole[i], alone[i].bits(6)[0]) for i in range(3))


def test_no_deployed_client_can_be_given_a_seed_for_its_noise() -> None:
    """The only entrance of a deployed client names no noise seed, and its settings have none."""
    tree = ast.parse(Path(str(remote.__file__)).read_text())
    words = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    assert "noise_seed" not in words
    assert not any("noise" in name for name in remote.NodeSettings.__dataclass_fields__)
