"""Random numbers that depend on who draws them and when, and on nothing else."""

from __future__ import annotations

import torch

from symprune.fed.randomness import Stream


def draws(*clients: int, seed: int = 3, turn: int = 5, purpose: str = "batch") -> list[list[float]]:
    return Stream.of(seed, turn, purpose, torch.tensor(clients)).uniform(6).tolist()


def test_every_client_draws_its_own_numbers_whoever_is_beside_it() -> None:
    together = draws(0, 1, 7)
    assert len({tuple(row) for row in together}) == 3
    assert together == [*draws(0), *draws(1), *draws(7)]


def test_seed_turn_and_purpose_all_count() -> None:
    base = draws(0)
    for other in (draws(0, seed=4), draws(0, turn=6), draws(0, purpose="noise")):
        assert other != base
    server = Stream.of(3, 5, "batch").uniform(6).tolist()
    assert server != base and draws(0) == base


def test_each_draw_moves_a_stream_on() -> None:
    stream = Stream.of(0, 0, "x", torch.arange(2))
    first, second = stream.uniform(4), stream.uniform(4)
    whole = Stream.of(0, 0, "x", torch.arange(2)).uniform(8)
    assert torch.equal(torch.cat([first, second], 1), whole)


def test_numbers_are_spread_as_they_should_be() -> None:
    """Of 40,000 draws a mean is within five of its standard errors."""
    stream = Stream.of(1, 0, "x", torch.arange(4))
    uniform, normal = stream.uniform(10_000), stream.normal(10_000)
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(float(uniform.mean()) - 0.5) < 5 * (1 / 12 / 40_000) ** 0.5
    assert abs(float(normal.mean())) < 5 / 40_000**0.5
    assert abs(float(normal.square().mean()) - 1) < 5 * (2 / 40_000) ** 0.5
    for row in stream.permutation(50):
        assert sorted(row.tolist()) == list(range(50))
    highs = torch.tensor([[2], [3], [50], [1]])
    drawn = stream.integers(highs, 1000)
    assert (drawn >= 0).all() and torch.equal(drawn.max(1).values.unsqueeze(1), highs - 1)
