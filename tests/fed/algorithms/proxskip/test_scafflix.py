"""Scafflix, i-Scaffnew and FLIX: the invariant that holds, the optimum that is reached."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.algorithms.proxskip.noisy_steps import sampling_noise, steps_for_accuracy
from symprune.fed.algorithms.proxskip.scafflix import Scafflix
from symprune.fed.algorithms.shared.control_variates import control_variates
from symprune.fed.problems.datasets import breast_cancer
from symprune.fed.problems.losses import Linear
from symprune.fed.problems.make import make_loss, make_problem
from symprune.fed.problems.optimum import local_minimisers, minimise
from symprune.fed.problems.partitions import label_ramp
from symprune.fed.problems.problem import Problem, Rows, stack_rows
from symprune.fed.problems.quadratic import quadratic
from symprune.fed.protocol import Received, State, Turn, per_client
from symprune.fed.simulate import Result, simulate

RAMP = tuple(torch.linspace(0.2, 0.9, 8, dtype=torch.float64).tolist())


@pytest.fixture(scope="module")
def problem() -> Problem:
    """8 clients of 40 points, label-wise, features scaled so that L_i runs from 0.12 to 1.6."""
    data = breast_cancer()
    scales = torch.linspace(1, 4, 8, dtype=torch.float64)
    parts = [
        (scales[i] * data.x[rows[:40]], data.y[rows[:40]])
        for i, rows in enumerate(_forty(label_ramp(data, 8, 0), data.y))
    ]
    return Problem(make_loss("logistic", data), stack_rows(parts), l2=0.01, name="label-wise")


def _forty(parts: list[Tensor], y: Tensor) -> list[Tensor]:
    """40 rows of each client with its share (i+1)/8 of positive ones."""
    out = []
    for i, rows in enumerate(parts):
        positive = round((i + 1) / 8 * 40)
        plus, minus = rows[y[rows] > 0], rows[y[rows] <= 0]
        out.append(torch.cat([plus[:positive], minus[: 40 - positive]]))
    return out


@pytest.fixture(scope="module")
def centres(problem: Problem) -> Tensor:
    return local_minimisers(problem)


def column(alpha: float | tuple[float, ...]) -> Tensor:
    values = alpha if isinstance(alpha, tuple) else (alpha,) * 8
    return torch.tensor(values, dtype=torch.float64)


def run(problem: Problem, rounds: int, **options: object) -> Result:
    algorithm = build("scafflix", tolerance=1e-12, **options)
    return simulate(algorithm, problem, rounds, evaluate_every=rounds)


def variates(result: Result) -> Tensor:
    turn = Turn(0, 0, 8, torch.arange(8))
    received = {"x": result.server["x"].expand(8, -1)}
    return result.algorithm.listen(result.client, received, turn)["h"]


def test_the_weighted_sum_of_control_variates_stays_zero_and_the_plain_one_does_not(
    problem: Problem,
) -> None:
    result = simulate(build("scafflix", alpha=RAMP), problem, 60)
    assert max(result.series("alpha_h_sum")) < 1e-10
    assert float(variates(result).sum(0).norm()) > 1e-3


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.1, RAMP])
def test_it_reaches_the_flix_optimum_and_learns_the_gradients_there(
    alpha: float | tuple[float, ...], problem: Problem, centres: Tensor
) -> None:
    best = minimise(problem, column(alpha), centres)
    result = run(problem, 500, alpha=alpha)
    assert float((result.model - best).norm()) < 1e-8
    a = column(alpha).unsqueeze(1)
    at_best = problem.gradient(a * best + (1 - a) * centres)
    assert float((variates(result) - at_best).norm()) < 1e-7


def test_the_lyapunov_function_falls_at_the_theorems_rate(
    problem: Problem, centres: Tensor
) -> None:
    a = column(RAMP).unsqueeze(1)
    best = minimise(problem, column(RAMP), centres)
    target = a * best + (1 - a) * centres
    slopes = problem.gradient(target)
    seeds, rounds = 5, 40
    total: dict[int, float] = {}
    for seed in range(seeds):
        algorithm = build("scafflix", alpha=RAMP, tolerance=1e-12)
        for stop in (0, 10, 20, rounds):
            result = simulate(algorithm, problem, stop, seed=seed, evaluate_every=100)
            done = result.algorithm
            assert isinstance(done, Scafflix) and isinstance(done.gamma, tuple) and done.p
            gamma = torch.tensor(done.gamma, dtype=torch.float64)
            points = a * result.server["x"] + (1 - a) * result.client["centre"]
            near = (gamma.min() / gamma * (points - target).square().sum(1)).mean()
            drift = (gamma * (variates(result) - slopes).square().sum(1)).mean()
            psi = float(near + gamma.min() / done.p**2 * drift)
            total[stop] = total.get(stop, 0.0) + psi / seeds
    # A round is 1/p steps on average, so t rounds shrink Psi by (1 - p^2)^(t/p) in expectation.
    for stop in (10, 20, rounds):
        assert total[stop] <= (1 - done.p**2) ** (stop / done.p) * total[0]


@dataclass(frozen=True)
class BadStart(Scafflix):
    """h with sum h_i = 0, as the thesis asks, but sum alpha_i h_i != 0."""

    project: ClassVar[bool] = False

    def client_init(self, problem: Problem, turn: Turn) -> State:
        state = super().client_init(problem, turn)
        q = torch.zeros_like(state["h"])
        q[0], q[-1] = 1.0, -1.0
        if self.project:
            a = per_client(self.alpha, turn, q)
            q = q - a * (a * q).sum(0) / a.square().sum()
        return {**state, "h": q}


def test_a_start_that_breaks_the_invariant_misses_the_optimum_and_projection_repairs_it(
    problem: Problem, centres: Tensor
) -> None:
    best = minimise(problem, column(RAMP), centres)
    bad = simulate(BadStart(alpha=RAMP, tolerance=1e-12), problem, 400, evaluate_every=400)
    assert float((bad.model - best).norm()) > 0.1

    class Projected(BadStart):
        project = True

    good = simulate(Projected(alpha=RAMP, tolerance=1e-12), problem, 600, evaluate_every=600)
    assert float((good.model - best).norm()) < 1e-8


def test_alpha_one_is_i_scaffnew_and_never_reads_a_centre(problem: Problem) -> None:
    plain = simulate(build("i-scaffnew"), problem, 40)
    result = simulate(build("scafflix", alpha=1.0), problem, 40)
    assert torch.equal(result.model, plain.model) and "centre" not in result.client
    ones = (1.0,) * 8
    assert torch.equal(simulate(build("scafflix", alpha=ones), problem, 40).model, plain.model)


def test_equal_steps_are_scaffnew_with_a_plain_mean(problem: Problem) -> None:
    same = simulate(build("i-scaffnew", individual=False), problem, 40)
    scaffnew = simulate(build("scaffnew"), problem, 40)
    assert (same.model - scaffnew.model).abs().max() < 1e-12


def test_one_client_that_always_communicates_is_gradient_descent(problem: Problem) -> None:
    alone = problem.select(slice(0, 1))
    alone = replace(alone, ids=None)
    step = 1 / alone.constants().L_max
    result = simulate(build("scafflix", alpha=1.0, p=1.0), alone, 30)
    assert (result.model - simulate(build("gd", gamma=step), alone, 30).model).abs().max() < 1e-12


@dataclass(frozen=True)
class PlainMean(Scafflix):
    """The server forgets the weights alpha_i^2 / gamma_i."""

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        alpha, gamma = self.scales(turn, server["x"])
        unweighted = replies["xhat"] * gamma / alpha.square()
        return {**super().server_step(server, replies, turn), "x": unweighted.mean(0)}


def test_a_plain_mean_breaks_the_invariant_and_misses_the_optimum(
    problem: Problem, centres: Tensor
) -> None:
    best = minimise(problem, column(RAMP), centres)
    wrong = simulate(PlainMean(alpha=RAMP, tolerance=1e-12), problem, 300, evaluate_every=300)
    assert wrong.history[-1]["alpha_h_sum"] > 1e-3
    assert float((wrong.model - best).norm()) > 0.1


def test_a_cohort_keeps_the_invariant_and_reaches_the_optimum(
    problem: Problem, centres: Tensor
) -> None:
    best = minimise(problem, column(RAMP), centres)
    result = run(problem, 500, alpha=RAMP, cohort_size=4)
    assert result.history[-1]["alpha_h_sum"] < 1e-10
    assert float((result.model - best).norm()) < 1e-4
    assert result.ledger.up_bytes.sum() < 0.6 * 500 * 8 * 30 * 8


def test_gradient_noise_leaves_a_floor_below_the_theorems() -> None:
    """One row at a time: A_i = 2 L_i of the rows, C_i from the gradients at the optimum."""
    torch.manual_seed(0)
    n, m, d, mu = 4, 10, 5, 0.5
    x = torch.randn(n, m, d, dtype=torch.float64)
    y = torch.randn(n, m, dtype=torch.float64)
    problem = Problem(Linear(d), Rows(x, y, torch.full((n, m), 1 / m, dtype=torch.float64)), l2=mu)
    best = minimise(problem)
    each = (x @ best - y).unsqueeze(-1) * x + mu * best
    noise = 2 * each.square().sum(-1).mean(1) - 2 * each.mean(1).square().sum(-1)
    L = x.square().sum(-1).max(1).values + mu
    gamma = 1 / (2 * L)
    p = math.sqrt(float((gamma * mu).min()))
    zeta = min(float((gamma * mu).min()), p**2)
    floor = float(gamma.min() / zeta * (gamma * noise).mean())
    algorithm = build("scafflix", alpha=1.0, gamma=tuple(gamma.tolist()), p=p, batch=1)
    slopes, tail = problem.gradient(best), []

    for seed in range(6):
        result = simulate(algorithm, problem, 120, seed=seed, evaluate_every=120)
        turn = Turn(0, 0, n, torch.arange(n))
        received = {"x": result.server["x"].expand(n, -1)}
        h = result.algorithm.listen(result.client, received, turn)["h"]
        near = (gamma.min() / gamma).mean() * (result.model - best).square().sum()
        drift = (gamma * (h - slopes).square().sum(1)).mean()
        tail.append(float(near + gamma.min() / p**2 * drift))
    assert 0 < sum(tail) / len(tail) <= floor


def test_individual_steps_need_far_fewer_rounds_when_smoothness_differs() -> None:
    """Quadratics with L_i in [1, 100] and mu_i = L_i / 20, each method with its theory's p."""
    generator = torch.Generator().manual_seed(0)
    L = torch.logspace(0, 2, 10, dtype=torch.float64)
    spread = torch.linspace(1 / 20, 1, 6, dtype=torch.float64)
    Q = torch.diag_embed(L.unsqueeze(1) * spread)
    centre = torch.randn(10, 6, generator=generator, dtype=torch.float64)
    problem = quadratic(Q, (Q @ centre.unsqueeze(-1)).squeeze(-1))
    best = minimise(problem)

    def rounds(name: str) -> int:
        result = simulate(
            build(name), problem, 2000, optimum=best, stop=lambda r: bool(r["distance"] < 1e-6)
        )
        return len(result.history) - 1

    assert rounds("i-scaffnew") * 4 < rounds("proxskip")


def test_a_sloppy_local_optimum_costs_accuracy_in_proportion(
    problem: Problem, centres: Tensor
) -> None:
    best = minimise(problem, column(0.1), centres)
    lowest = float(problem.value(0.1 * best + 0.9 * centres).mean())
    errors = []
    for tolerance in (1e-1, 1e-2, 1e-4, 1e-6):
        result = simulate(build("scafflix", alpha=0.1, tolerance=tolerance), problem, 120)
        models = 0.1 * result.model + 0.9 * centres
        loss = float(problem.value(0.1 * result.model + 0.9 * result.client["centre"]).mean())
        errors.append(abs(loss - lowest))
        assert models.isfinite().all()
    assert errors[0] > errors[1] > errors[2] and errors[3] < 1e-6


def rounds_to(problem: Problem, centres: Tensor, name: str, alpha: float, **options: object) -> int:
    lowest = float(
        problem.value(
            alpha * minimise(problem, column(alpha), centres) + (1 - alpha) * centres
        ).mean()
    )
    x0 = torch.ones(30, dtype=torch.float64)
    result = simulate(
        build(name, alpha=alpha, tolerance=1e-10, **options),
        problem,
        600,
        x0=x0,
        stop=lambda record: bool(record["personal_loss"] - lowest < 1e-6),
    )
    assert result.history[-1]["personal_loss"] - lowest < 1e-6
    return len(result.history) - 1


def test_more_personalisation_needs_fewer_rounds_and_local_steps_far_fewer(
    problem: Problem, centres: Tensor
) -> None:
    assert problem.constants().kappa_max == pytest.approx(162, rel=0.02)
    alphas = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
    ours = [rounds_to(problem, centres, "scafflix", a) for a in alphas]
    descent = [rounds_to(problem, centres, "flix-gd", a) for a in alphas]
    for rounds in (ours, descent):
        assert all(later >= earlier - 1 for earlier, later in pairwise(rounds))
    assert all(4 * a <= b for a, b in zip(ours, descent, strict=True))
    assert ours[0] <= 0.75 * ours[-1]
    assert rounds_to(problem, centres, "scafflix", 0.5, individual=False) > ours[2]


def test_alpha_outside_its_range_is_refused(problem: Problem) -> None:
    with pytest.raises(SympruneError, match="alpha"):
        simulate(build("scafflix", alpha=0.0), problem, 1)
    with pytest.raises(SympruneError, match="alpha"):
        simulate(build("scafflix", alpha=(0.5, 0.5)), problem, 1)
    with pytest.raises(SympruneError, match="use scafflix"):
        simulate(build("i-scaffnew", alpha=0.5), problem, 1)


def test_the_steps_of_the_corollary_reach_the_accuracy_they_were_chosen_for() -> None:
    """Corollary 3.2.5 with one row at a time: mean Psi ends below the accuracy, for two of them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 10, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(4, 10, generator=generator, dtype=torch.float64)
    rows = Rows(x, y, torch.full((4, 10), 0.1, dtype=torch.float64))
    problem = Problem(Linear(5), rows, l2=0.5)
    best = minimise(problem)
    slopes = problem.gradient(best)
    each = (x @ best - y).unsqueeze(-1) * x + 0.5 * best
    A, C = sampling_noise(problem, best.expand(4, -1), 1)
    torch.testing.assert_close(A, 2 * (x.square().sum(-1).max(1).values + 0.5))
    expected = 2 * each.square().sum(-1).mean(1) - 2 * slopes.square().sum(1)
    torch.testing.assert_close(C, expected)

    chosen = []
    for accuracy in (0.3, 0.1):
        steps = steps_for_accuracy(problem, best.expand(4, -1), 1, accuracy)
        gamma, ends = torch.tensor(steps, dtype=torch.float64), []
        chosen.append(gamma)
        for seed in range(4):
            algorithm = build("scafflix", alpha=1.0, gamma=steps, batch=1)
            result = simulate(algorithm, problem, 100, seed=seed, evaluate_every=100)
            h = control_variates(result.algorithm, result.server, result.client)  # type: ignore[arg-type]
            p = result.algorithm.p  # type: ignore[attr-defined]
            assert p == pytest.approx(math.sqrt(0.5 * min(steps)))
            near = (gamma.min() / gamma).mean() * (result.model - best).square().sum()
            drift = (gamma * (h - slopes).square().sum(1)).mean()
            ends.append(float(near + gamma.min() / p**2 * drift))
        assert sum(ends) / len(ends) <= accuracy
    assert (chosen[1] < chosen[0]).all() and (chosen[0] <= 1 / A).all()


def test_larger_batches_allow_larger_steps(problem: Problem, centres: Tensor) -> None:
    steps = [torch.tensor(steps_for_accuracy(problem, centres, b, 1e-3)) for b in (1, 4, 16)]
    assert (steps[0] < steps[1]).all() and (steps[1] < steps[2]).all()


@pytest.fixture(scope="module")
def network() -> Problem:
    return make_problem("digits", "mlp:16", "class:3", clients=4, client_test_share=0.3)


@pytest.mark.parametrize("name", ["flix-sgd", "scafflix"])
def test_a_networks_own_optimum_is_so_many_epochs_of_sgd(name: str, network: Problem) -> None:
    """One batch of all rows is a step of gradient descent, so three epochs are three steps."""
    options = {"eta": 0.1} if name == "flix-sgd" else {"gamma": 0.1, "p": 0.5}
    algorithm = build(name, local_epochs=3, local_batch=1000, local_lr=0.2, **options)
    result = simulate(algorithm, network, 0, seed=5)
    w = network.initial(5).expand(4, -1)
    for _ in range(3):
        w = w - 0.2 * network.gradient(w)
    torch.testing.assert_close(result.client["centre"], w)
    with pytest.raises(SympruneError, match="local_epochs"):
        simulate(build(name, local_epochs=0, **options), network, 0)


def test_flix_by_sgd_with_all_rows_is_flix_by_gradient_descent(problem: Problem) -> None:
    exact = simulate(build("flix-gd", alpha=RAMP), problem, 10)
    assert torch.equal(
        simulate(build("flix-sgd", alpha=RAMP, batch=None), problem, 10).model, exact.model
    )
    noisy = simulate(build("flix-sgd", alpha=RAMP, batch=5, cohort_size=4), problem, 10)
    assert not torch.equal(noisy.model, exact.model)
    assert noisy.history[-1]["personal_loss"] < noisy.history[0]["personal_loss"]


def test_a_mixture_with_the_shared_network_beats_the_clients_own_and_the_shared_alone(
    network: Problem,
) -> None:
    run = simulate(
        build("scafflix", alpha=0.5, gamma=0.3, p=0.2, batch=20, local_epochs=10, local_lr=0.3),
        network,
        30,
        evaluate_every=30,
    )
    own = network.evaluate_personal(run.client["centre"])["personal_accuracy"]
    shared = network.evaluate_personal(run.model.expand(4, -1))["personal_accuracy"]
    assert run.history[-1]["personal_accuracy"] > max(own - 0.02, shared)
