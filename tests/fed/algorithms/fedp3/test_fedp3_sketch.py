"""FedP3's theory: permutation sketches, Theorem 4.3.3; LDP-FedP3: clipping, noise, accountant."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.algorithms.fedp3.ldp_fedp3 import clipped_sum, record_gradients
from symprune.fed.mechanism import UNITS, clip_to_whole
from symprune.fed.privacy import (
    closed_form_multiplier,
    epsilon,
    noise_multiplier,
    renyi_epsilon,
    theorem_schedule,
)
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.problems.quadratic import Quadratic, quadratic
from symprune.fed.protocol import Turn
from symprune.fed.simulate import simulate


def turn(number: int, n: int) -> Turn:
    return Turn(number, 0, n, torch.arange(n))


@pytest.mark.parametrize(("n", "d"), [(5, 20), (4, 22), (7, 5)])
def test_every_coordinate_has_exactly_one_owner(n: int, d: int) -> None:
    algorithm = build("fedp3-sketch")
    for number in range(20):
        owners = algorithm.own_coordinates(d, turn(number, n))  # type: ignore[attr-defined]
        assert owners.sum(0).tolist() == [1] * d
        if d % n == 0:
            assert owners.sum(1).tolist() == [d // n] * n


def test_the_sketch_is_unbiased_with_the_variance_of_the_theory() -> None:
    n, d, draws = 5, 20, 4000
    y = torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    algorithm = build("fedp3-sketch")
    mean, square = torch.zeros(n, d, dtype=torch.float64), 0.0
    for number in range(draws):
        scaled = n * algorithm.own_coordinates(d, turn(number, n)) * y  # type: ignore[attr-defined]
        mean += scaled / draws
        square += float(scaled.mean(0).square().sum()) / draws
    assert float((mean - y).norm() / y.norm()) < 0.05
    assert square == pytest.approx(float(y.square().sum(1).mean()), rel=0.01)


def quadratics(seed: int, n: int = 5, d: int = 20) -> Quadratic:
    """Clients that differ in curvature, by up to ten times, and in their minimum."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(n, d, d, dtype=torch.float64, generator=generator) / d**0.5
    scale = torch.logspace(0, 1, n, dtype=torch.float64).view(n, 1, 1)
    Q = scale * (root @ root.transpose(1, 2) + 0.1 * torch.eye(d, dtype=torch.float64))
    return quadratic(Q, torch.randn(n, d, dtype=torch.float64, generator=generator))


def least_mean(problem: Quadratic) -> float:
    """`(1/n) sum_i inf f_i`."""
    points = torch.linalg.solve(problem.rows.x, problem.rows.y)
    return float(problem.value(points).mean())


@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_norm_obeys_the_corrected_bound(seed: int) -> None:
    problem = quadratics(seed)
    constants = problem.constants()
    mean_L, L_max = sum(constants.L) / 5, constants.L_max
    x0 = torch.ones(20, dtype=torch.float64)
    gap = problem.mean_value(x0) - least_mean(problem)
    for K in (10, 100, 1000):
        result = simulate(build("fedp3-sketch", iterations=K), problem, K, x0=x0)
        gamma = result.algorithm.gamma  # type: ignore[attr-defined]
        assert gamma == pytest.approx(min(1 / L_max, 1 / math.sqrt(mean_L * L_max * K)))
        bound = 2 * (1 + mean_L * L_max * gamma**2) ** K * gap / (gamma * K)
        assert min(result.series("gradient_norm")) ** 2 <= bound


def test_the_bound_as_printed_is_broken_near_the_minimum_of_unequal_clients() -> None:
    problem = quadratics(0)
    best = torch.linalg.solve(problem.rows.x.mean(0), problem.rows.y.mean(0))
    x0 = best + 1e-2
    K = 500
    result = simulate(build("fedp3-sketch", iterations=K), problem, K, x0=x0)
    gamma = result.algorithm.gamma  # type: ignore[attr-defined]
    least = min(record["gradient_norm"] for record in result.history[1:]) ** 2
    printed = 6 * (problem.mean_value(x0) - problem.mean_value(best)) / (gamma * K)
    corrected = 6 * (problem.mean_value(x0) - least_mean(problem)) / (gamma * K)
    assert printed < least <= corrected


def test_all_clients_together_send_one_model_per_step() -> None:
    problem = make_problem("digits", clients=4)
    last = simulate(build("fedp3-sketch"), problem, 3).history[-1]
    assert 4 * last["paper_bits_up"] == 3 * 32 * problem.dimension
    everything = simulate(build("fedp3-sketch", sketch=False), problem, 3).history[-1]
    assert everything["paper_bits_up"] == 4 * last["paper_bits_up"]


def test_random_pruning_on_the_way_down_sends_a_share_of_the_model() -> None:
    problem = make_problem("digits", clients=4)
    last = simulate(build("fedp3-sketch", keep=0.5), problem, 3).history[-1]
    assert last["paper_bits_down"] == 3 * 32 * round(0.5 * problem.dimension)


@pytest.fixture(scope="module")
def softmax() -> Problem:
    return make_problem("digits", clients=4, l2=0.0, dtype="float64")


def test_no_record_weighs_more_than_the_clip(softmax: Problem) -> None:
    w = torch.randn(softmax.dimension, dtype=torch.float64)
    g = record_gradients(softmax, w, softmax.rows[0])
    clipped = clip_to_whole(g / 0.5).double() * (0.5 / UNITS)
    assert float(g.norm(dim=1).max()) > 0.5
    assert float(clipped.norm(dim=1).max()) <= 0.5
    rounding = 0.5 / UNITS * softmax.dimension**0.5 + 1e-9
    assert torch.allclose(clipped.norm(dim=1), g.norm(dim=1).clamp_max(0.5), atol=rounding, rtol=0)


def test_removing_a_record_changes_the_gradient_by_at_most_clip_over_batch(
    softmax: Problem,
) -> None:
    w = torch.randn(4, softmax.dimension, dtype=torch.float64) * 3
    stream = turn(0, 4).stream
    whole = clipped_sum(softmax, w, 64, 0.7, stream("batch"))
    moved = []
    for record in range(40):
        weights = softmax.rows.weights.clone()
        weights[0, record] = 0
        without = replace(softmax, rows=replace(softmax.rows, weights=weights))
        # The rate must not depend on the record that is gone.
        without.__dict__["counts"] = softmax.counts
        less = clipped_sum(without, w, 64, 0.7, stream("batch"))
        moved.append(float((whole - less)[0].double().norm()))
        assert torch.equal(whole[1:], less[1:])
    assert 0 < max(moved) <= UNITS


def test_the_noise_in_a_step_is_gamma_times_sigma(softmax: Problem) -> None:
    options = {"gamma": 2.0, "multiplier": 3.0, "clip": 0.5, "batch": 64}
    algorithm = build("ldp-fedp3", **options).prepare(softmax.constants())
    quiet = replace(algorithm, multiplier=0.0)
    x = torch.zeros(4, softmax.dimension, dtype=torch.float64)
    noise = []
    for seed in range(50):
        values: list[Tensor] = []
        for one in (algorithm, quiet):
            _, message = one.client_step({}, {"x": x}, softmax, Turn(0, seed, 4, torch.arange(4)))
            values.append(torch.cat(message["u"].tensor))  # type: ignore[union-attr, arg-type]
        noise.append(values[0] - values[1])
    deviation = torch.stack(noise).std()
    assert float(deviation) == pytest.approx(2.0 * 3.0 * 0.5 / 64, rel=0.05)


def test_batches_are_poisson_with_the_expected_size(softmax: Problem) -> None:
    ones = replace(softmax, loss=_CountingLoss())
    w = torch.zeros(4, 1, dtype=torch.float64)
    sizes = [clipped_sum(ones, w, 64, 1.0, turn(t, 4).stream("batch"))[:, 0] for t in range(99)]
    drawn = torch.stack(sizes).double() / UNITS
    assert float(drawn.mean()) == pytest.approx(64, rel=0.05)
    rate = 64 / float(softmax.counts[0])
    assert float(drawn.std()) == pytest.approx(math.sqrt(64 * (1 - rate)), rel=0.15)


class _CountingLoss:
    """Every record's gradient is one, so that sums count records."""

    def gradient(self, w: Tensor, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return torch.ones(len(x), 1, dtype=w.dtype)


# Sampling rate, steps, target, constant, multiplier, epsilon by the accountant; delta = 1e-5.
ROWS = [
    (0.01, 10_000, 1, 4, 6.79, 0.58),
    (0.01, 10_000, 1, 2, 4.80, 0.84),
    (0.01, 10_000, 1, 1, 3.39, 1.25),
    (0.1, 1_000, 4, 4, 5.36, 2.66),
    (0.1, 1_000, 8, 2, 1.90, 9.75),
    (0.1, 1_000, 8, 4, 2.68, 6.14),
]


@pytest.mark.parametrize(("rate", "steps", "target", "c", "z", "spent"), ROWS)
def test_the_closed_form_with_constant_four_is_safe_and_with_one_is_not(
    rate: float, steps: int, target: float, c: float, z: float, spent: float
) -> None:
    multiplier = closed_form_multiplier(target, 1e-5, rate, steps, c)
    assert multiplier == pytest.approx(z, abs=0.01)
    assert renyi_epsilon(rate, multiplier, steps, 1e-5) == pytest.approx(spent, abs=0.01)
    if c == 4:
        assert renyi_epsilon(rate, multiplier, steps, 1e-5) <= target


@pytest.mark.parametrize(("rate", "steps", "target"), [(0.05, 100, 4), (0.01, 100, 1)])
def test_the_closed_form_is_refused_where_it_is_unsafe(
    rate: float, steps: int, target: float
) -> None:
    with pytest.raises(SympruneError, match="unsafe"):
        closed_form_multiplier(target, 1e-5, rate, steps)
    z = rate / target * math.sqrt(4 * steps * math.log(1e5))
    assert renyi_epsilon(rate, z, steps, 1e-5) > target


def test_the_accountant_returns_its_reference_values() -> None:
    assert renyi_epsilon(0.01, 4.0, 10_000, 1e-5) == pytest.approx(1.035, abs=0.005)
    assert renyi_epsilon(1.0, 5.0, 1, 1e-5) == pytest.approx(0.7945, abs=0.005)


@pytest.mark.parametrize(
    ("rate", "z", "steps", "delta"),
    [
        (0.01, 4.0, 10_000, 1e-5),
        (0.2, 1.66, 150, 1e-4),
        (0.2, 8.87, 150, 1e-4),
        (1.0, 5.0, 3, 1e-6),
    ],
)
def test_the_accountant_agrees_with_googles(
    rate: float, z: float, steps: int, delta: float
) -> None:
    accounting = pytest.importorskip("dp_accounting")
    event = accounting.PoissonSampledDpEvent(rate, accounting.GaussianDpEvent(z))
    oracle = accounting.rdp.RdpAccountant()
    oracle.compose(event, steps)
    expected = oracle.get_epsilon(delta)
    ours = renyi_epsilon(rate, z, steps, delta)
    exact = accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    exact.compose(event, steps)
    assert epsilon(rate, z, steps, delta) == pytest.approx(exact.get_epsilon(delta), rel=2e-3)
    assert epsilon(rate, z, steps, delta) < ours
    # Ours looks at whole orders only, so it may promise a little less, never more.
    assert expected * (1 - 1e-6) <= ours <= 1.02 * expected


@pytest.mark.parametrize("target", [0.5, 2.0, 8.0])
def test_the_calibrated_noise_spends_the_target_and_not_more(target: float) -> None:
    z = noise_multiplier(target, 1e-4, 64 / 314, 150)
    assert 0.99 * target <= epsilon(64 / 314, z, 150, 1e-4) <= target


@pytest.mark.parametrize("rows", [100, 1_000_000])
def test_steps_times_step_size_is_the_same_in_both_branches_of_the_theorem(rows: int) -> None:
    s = theorem_schedule(rows, 1.0, 1e-5, smoothness=2.0, gap=3.0, clip=0.7, dimension=650)
    noise = 4 * 650 * math.log(1e5)
    expected = rows * math.sqrt(3.0) / (0.7 * math.sqrt(2.0 * noise))
    assert s.gamma * s.steps == pytest.approx(expected)


def test_a_run_beyond_the_privacy_budget_is_refused(softmax: Problem) -> None:
    algorithm = build("ldp-fedp3", iterations=2, epsilon=20.0)
    simulate(algorithm, softmax, 2)
    with pytest.raises(SympruneError, match="spent"):
        simulate(algorithm, softmax, 3)


def test_private_randomness_cannot_be_repeated_from_the_seed(softmax: Problem) -> None:
    runs = [simulate(build("ldp-fedp3", private_randomness=p), softmax, 1).model
            for p in (False, False, True, True)]  # fmt: skip
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[2], runs[3])


def test_the_client_with_the_fewest_records_sets_the_noise() -> None:
    even = make_problem("digits", split="iid", clients=4)
    uneven = make_problem("digits", split="quantity:0.5", clients=4)
    z = [build("ldp-fedp3", batch=16).prepare(p.constants()).multiplier for p in (even, uneven)]  # type: ignore[attr-defined]
    assert int(uneven.counts.min()) < int(even.counts.min())
    assert z[1] > z[0]
