"""Client samplings of SPPM-AS: unbiased, with exact constants (thesis section 5.3)."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.algorithms.cohort_squeeze.sampling import Sampling, cluster, make_sampling
from symprune.fed.problems.datasets import load
from symprune.fed.problems.partitions import by_cluster, partition
from symprune.fed.randomness import Stream

EVEN, UNEVEN = (0, 0, 0, 1, 1, 1), (0, 0, 0, 0, 1, 2)
CHANCES = (0.1, 0.3, 0.05, 0.25, 0.2, 0.1)
MU = (0.5, 1.0, 0.2, 2.0, 0.7, 1.1)

SMALL: dict[str, Sampling] = {
    "full": make_sampling("full", 6),
    "uniform": make_sampling("uniform", 6),
    "importance": make_sampling("importance", 6, mu=MU),
    "nonuniform": make_sampling("nonuniform", 6, chances=CHANCES),
    "nice": make_sampling("nice", 6, 2),
    "block": make_sampling("block", 6, labels=EVEN),
    "block uneven": make_sampling("block", 6, labels=UNEVEN, chances=(0.5, 0.2, 0.3)),
    "block two-stage": make_sampling("block", 6, 2, labels=UNEVEN),
    "stratified": make_sampling("stratified", 6, labels=EVEN),
    "stratified uneven": make_sampling("stratified", 6, labels=UNEVEN),
    "stratified two-stage": make_sampling("stratified", 6, 2, labels=UNEVEN),
}


def gradients(n: int, seed: int = 0) -> Tensor:
    """Random `a_i` that sum to zero, as gradients at the optimum do."""
    a = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return a - a.mean(0)


def enumerated(sampling: Sampling, a: Tensor) -> tuple[float, float]:
    """mu_AS and sigma2_AS from their definitions, over all cohorts."""
    w = sampling.weights
    mu = min(sum(MU[i] * float(w[i]) for i in c) for _, c in sampling.cohorts())
    square = [chance * (w[list(c)] @ a[list(c)]).square().sum() for chance, c in sampling.cohorts()]
    return mu, float(sum(square))


@pytest.mark.parametrize("name", SMALL)
def test_the_weights_make_every_sampling_unbiased(name: str) -> None:
    sampling, total, chance_sum = SMALL[name], torch.zeros(6, dtype=torch.float64), 0.0
    for chance, cohort in sampling.cohorts():
        total[list(cohort)] += chance * sampling.weights[list(cohort)]
        chance_sum += chance
    assert chance_sum == pytest.approx(1)
    assert torch.allclose(total, torch.full_like(total, 1 / 6), atol=1e-12)


@pytest.mark.parametrize("name", SMALL)
def test_constants_equal_enumeration(name: str) -> None:
    a = gradients(6)
    mu, variance = enumerated(SMALL[name], a)
    assert SMALL[name].strong_convexity(MU) == pytest.approx(mu, abs=1e-10)
    assert SMALL[name].variance(a) == pytest.approx(variance, abs=1e-10)


@pytest.mark.parametrize("name", SMALL)
def test_drawn_cohorts_have_the_stated_probabilities(name: str) -> None:
    sampling, draws = SMALL[name], 1500
    stream, seen = Stream.of(0, 0, name), torch.zeros(6, dtype=torch.float64)
    for _ in range(draws):
        seen[sampling.draw(stream)] += 1
    p = sampling.probability
    error = (p * (1 - p) / draws).sqrt()
    assert bool(((seen / draws - p).abs() <= 3.5 * error + 1e-12).all())


def test_the_limits_of_one_block_and_of_single_clients_are_the_known_samplings() -> None:
    a, one, all_apart = gradients(6), (0,) * 6, tuple(range(6))
    for name, labels, same_as in (
        ("block", one, SMALL["full"]),
        ("block", all_apart, SMALL["uniform"]),
        ("stratified", one, SMALL["uniform"]),
        ("stratified", all_apart, SMALL["full"]),
    ):
        limit = make_sampling(name, 6, labels=labels)
        assert limit.variance(a) == pytest.approx(same_as.variance(a), abs=1e-12)
        assert limit.strong_convexity(MU) == pytest.approx(same_as.strong_convexity(MU))
    assert make_sampling("nice", 6, 6).variance(a) == pytest.approx(0, abs=1e-12)


def test_a_larger_nice_cohort_has_less_variance_and_more_convexity() -> None:
    a, nice = gradients(6), [make_sampling("nice", 6, size) for size in range(1, 7)]
    variance, mu = [s.variance(a) for s in nice], [s.strong_convexity(MU) for s in nice]
    assert variance == sorted(variance, reverse=True) and mu == sorted(mu)


def test_importance_sampling_reaches_the_mean_strong_convexity() -> None:
    assert SMALL["importance"].strong_convexity(MU) == pytest.approx(sum(MU) / 6)


def test_a_bad_clustering_makes_stratified_worse_than_nice_sampling() -> None:
    a = torch.tensor([[0.0, 1], [1, 0], [0, -1], [-1, 0]], dtype=torch.float64)
    labels = (0, 1, 0, 1)
    assert make_sampling("stratified", 4, labels=labels).variance(a) == pytest.approx(1 / 2)
    assert make_sampling("nice", 4, 2).variance(a) == pytest.approx(1 / 3)
    assert make_sampling("block", 4, labels=labels).variance(a) == pytest.approx(0)


def test_the_best_clustering_beats_nice_sampling_and_the_mean_clustering_equals_it() -> None:
    splits = [tuple(0 if i in half else 1 for i in range(6)) for half in combinations(range(6), 3)]
    for seed in range(100):
        a = gradients(6, seed)
        values = [make_sampling("stratified", 6, labels=s).variance(a) for s in splits]
        nice = make_sampling("nice", 6, 2).variance(a)
        assert min(values) <= nice + 1e-12
        assert sum(values) / len(values) == pytest.approx(nice)


def test_homogeneous_strata_have_no_variance() -> None:
    a = gradients(2).repeat_interleave(3, 0)
    assert SMALL["stratified"].variance(a) == pytest.approx(0, abs=1e-12)
    assert SMALL["nice"].variance(a) > 0.01


def test_kmeans_finds_the_clusters_that_made_the_sketches() -> None:
    centres = 10 * torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(20, 5, generator=torch.Generator().manual_seed(2))
    labels = cluster(centres.repeat_interleave(5, 0) + 0.1 * noise, 4, seed=0)
    assert labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5


def test_wrong_samplings_are_named() -> None:
    with pytest.raises(SympruneError, match="lottery"):
        make_sampling("lottery", 6)
    with pytest.raises(SympruneError, match="7 of 6"):
        make_sampling("nice", 6, 7)
    with pytest.raises(SympruneError, match="6 cluster labels"):
        make_sampling("stratified", 6, labels=(0, 1))
    with pytest.raises(SympruneError, match="sum to 1"):
        make_sampling("nonuniform", 3, chances=(0.5, 0.5, 0.5))
    with pytest.raises(SympruneError, match="mu_i"):
        make_sampling("importance", 3, mu=(1.0, 0.0, 1.0))


def test_clients_of_one_stratum_have_rows_of_one_cluster() -> None:
    data = load("digits")
    found = by_cluster(data, 4, seed=0)
    clients = partition(data, "strata:4", 10)
    for stratum, members in enumerate(((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))):
        rows = torch.cat([clients[i] for i in members])
        assert sorted(rows.tolist()) == found[stratum].tolist()
    with pytest.raises(SympruneError, match="20 strata"):
        partition(data, "strata:20", 10)
