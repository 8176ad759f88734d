"""SPPM-AS: its proximal steps, the theorem's bounds, special cases and costs (thesis ch. 5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.algorithms.cohort_squeeze.sampling import Sampling, make_sampling
from symprune.fed.algorithms.cohort_squeeze.theory import (
    bound,
    cost,
    exact_prox,
    inexact_bound,
    minibatch_step,
    outlook,
    step_rule,
)
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.optimum import minimise
from symprune.fed.problems.problem import Problem
from symprune.fed.problems.quadratic import quadratic
from symprune.fed.protocol import Turn
from symprune.fed.randomness import Stream
from symprune.fed.simulate import simulate

GAMMAS = (0.1, 1.0, 10.0, 1000.0)
BLOCKS = (0, 0, 0, 1, 1, 1)


@pytest.fixture(scope="module")
def logistic() -> Problem:
    return make_problem("breast-cancer", clients=6, split="feature", l2=0.1, dtype="float64")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def samplings(n: int, mu: tuple[float, ...]) -> dict[str, Sampling]:
    names = ("full", "uniform", "importance", "nice", "block", "stratified")
    return {
        name: make_sampling(name, n, 2 if name == "nice" else None, BLOCKS, None, mu)
        for name in names
    }


@pytest.mark.parametrize("gamma", [0.01, 1.0, 100.0])
def test_the_prox_undoes_a_gradient_step_and_contracts(logistic: Problem, gamma: float) -> None:
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    for seed in range(20):
        x, y = normal(2, logistic.dimension, seed=seed)
        ahead = x + gamma * logistic.mean_gradient(x)
        assert torch.allclose(exact_prox(logistic, ahead, gamma, weights), x, atol=1e-6)
        distance = exact_prox(logistic, x, gamma, weights) - exact_prox(logistic, y, gamma, weights)
        assert distance.norm() <= (x - y).norm() / (1 + gamma * logistic.l2) + 1e-6


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("name", ["nice", "stratified"])
def test_the_theorem_is_an_equality_for_equal_quadratics(name: str, gamma: float) -> None:
    """`f_i = mu/2 ||x - c_i||^2`: the proximal point is a mean of x and the cohort's centre. All
    cohorts are enumerated, 20 000 chains draw among them; only the chains' noise remains."""
    sampling, mu, centres = samplings(6, (1.0,) * 6)[name], 0.5, normal(6, 3)
    centres = centres - centres.mean(0)
    middle = torch.stack(
        [sampling.weights[list(c)] @ centres[list(c)] for _, c in sampling.cohorts()]
    )
    stream, x = Stream.of(7, 0, "chains"), torch.ones(20_000, 3, dtype=torch.float64)
    predicted, variance = 3.0, sampling.variance(mu * centres)
    for _ in range(30):
        x = (x + gamma * mu * middle[stream.integers(len(middle), 20_000)[0]]) / (1 + gamma * mu)
        predicted = (predicted + gamma**2 * variance) / (1 + gamma * mu) ** 2
        assert float(x.square().sum(1).mean()) == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_no_sampling_exceeds_the_theorem_on_random_quadratics(gamma: float) -> None:
    root = normal(6, 4, 4, seed=3)
    Q = root @ root.transpose(1, 2) / 4 + 0.3 * torch.eye(4, dtype=torch.float64)
    problem = quadratic(Q, normal(6, 4, seed=4))
    mu, optimum = problem.constants().mu, minimise(problem)
    a = problem.gradient(optimum)
    for name, sampling in samplings(6, mu).items():
        errors = torch.zeros(8, dtype=torch.float64)
        for seed in range(30):
            stream, x = Stream.of(seed, 0, name), torch.zeros(4, dtype=torch.float64)
            for t in range(8):
                cohort = sampling.draw(stream)
                w = sampling.weights[cohort]
                curvature = (w.view(-1, 1, 1) * Q[cohort]).sum(0) + torch.eye(4) / gamma
                x = torch.linalg.solve(curvature, w @ problem.rows.y[cohort] + x / gamma)
                errors[t] += (x - optimum).square().sum() / 30
        strength, variance = sampling.strong_convexity(mu), sampling.variance(a)
        for t in range(8):
            start = float(optimum.square().sum())
            assert errors[t] <= bound(gamma, strength, variance, start, t + 1) + 1e-12


@pytest.mark.parametrize("epsilon", [0.5, 0.1, 0.02])
def test_the_step_rule_reaches_its_goal(epsilon: float) -> None:
    mu, variance, start = 0.7, 0.9, 25.0
    gamma, steps = step_rule(epsilon, mu, variance, start)
    assert bound(gamma, mu, variance, start, steps) <= epsilon * (1 + 1e-9)
    assert bound(gamma, mu, variance, start, steps // 4) > epsilon


def test_inexact_steps_stay_under_their_bound() -> None:
    sampling, mu, gamma, error = samplings(6, (1.0,) * 6)["nice"], 0.5, 2.0, 0.05
    centres = normal(6, 3)
    centres = centres - centres.mean(0)
    variance, stream = sampling.variance(mu * centres), Stream.of(0, 0, "inexact")
    x = torch.ones(500, 3, dtype=torch.float64)
    for t in range(1, 11):
        cohorts = [sampling.draw(stream) for _ in range(500)]
        means = torch.stack([sampling.weights[c] @ centres[c] for c in cohorts])
        push = stream.normal(500, 3)[0]
        push = error**0.5 * push / push.norm(dim=1, keepdim=True)
        x = (x + gamma * mu * means) / (1 + gamma * mu) + push
        assert float(x.square().sum(1).mean()) <= inexact_bound(
            gamma, mu, variance, 3.0, t, error, s=1.0
        )


def test_one_gradient_step_per_cohort_is_minibatch_gradient_descent(logistic: Problem) -> None:
    options = {"sampling": "nice", "cohort_size": 2}
    result = simulate(
        build("sppm-as", solver="gd", local_rounds=1, gamma=0.3, step=0.5, **options), logistic, 5
    )
    x, sampling = torch.zeros(logistic.dimension, dtype=torch.float64), make_sampling("nice", 6, 2)
    for number in range(5):
        turn = Turn(number, 0, 6, torch.arange(6))
        cohort = sampling.draw(turn.shared("cohort"))
        x = x - 0.5 * logistic.select(cohort).gradient(x).mean(0)
    assert torch.allclose(result.model, x, atol=1e-14)
    assert result.history[-1]["cost"] == 5


def test_local_steps_without_a_pull_are_fedavg(logistic: Problem) -> None:
    local = build(
        "sppm-as", solver="local-sgd", gamma=float("inf"), local_rounds=1, local_steps=3, step=0.4
    )
    result = simulate(replace(local, sampling="full"), logistic, 4)
    x = torch.zeros(logistic.dimension, dtype=torch.float64)
    for _ in range(4):
        w = x.expand(6, -1)
        for _ in range(3):
            w = w - 0.4 * logistic.gradient(w)
        x = w.mean(0)
    assert torch.allclose(result.model, x, atol=1e-12)


def test_one_huge_full_step_solves_the_problem(logistic: Problem) -> None:
    algorithm = build("sppm-as", sampling="full", gamma=1e6, local_rounds=60)
    result = simulate(algorithm, logistic, 60)
    assert int(result.server["global_rounds"]) == 1
    assert float((result.model - minimise(logistic)).norm()) < 1e-5


@pytest.mark.parametrize("solver", ["gd", "agd", "cg", "lbfgs", "local-sgd"])
@pytest.mark.parametrize("gamma", [0.5, 50.0])
def test_every_solver_finds_the_proximal_point(
    logistic: Problem, solver: str, gamma: float
) -> None:
    rounds = 150 if solver in ("gd", "local-sgd") else 40
    x0 = normal(logistic.dimension)
    algorithm = build(
        "sppm-as", sampling="full", solver=solver, gamma=gamma, local_rounds=rounds, local_steps=1
    )
    result = simulate(algorithm, logistic, rounds, x0=x0, evaluate_every=rounds)
    target = exact_prox(logistic, x0, gamma, torch.full((6,), 1 / 6))
    assert float((result.model - target).norm()) < 1e-4 * float((x0 - target).norm())


@pytest.mark.parametrize("solver", ["cg", "lbfgs"])
def test_counting_iterations_leaves_the_trials_of_the_line_search_out(
    logistic: Problem, solver: str
) -> None:
    algorithm = build(
        "sppm-as", sampling="full", solver=solver, gamma=100.0, local_rounds=4, strict=False
    )
    last = simulate(algorithm, logistic, 40, x0=normal(logistic.dimension)).history[-1]
    assert last["local_rounds"] == 40 > last["iterations"] == last["cost"]
    assert last["global_rounds"] >= 2


def test_the_cohort_stays_for_k_rounds_and_only_its_members_are_spoken_to(
    logistic: Problem,
) -> None:
    algorithm = build("sppm-as", sampling="nice", cohort_size=2, local_rounds=3)
    result = simulate(algorithm, logistic, 3)
    assert int((result.ledger.up_bytes > 0).sum()) == 2
    assert result.history[-1]["global_rounds"] == 1
    after = simulate(algorithm, logistic, 30)
    assert int((after.ledger.up_bytes > 0).sum()) > 2 and after.history[-1]["global_rounds"] == 10


def test_strata_are_found_from_sketches_the_clients_send_once() -> None:
    problem = make_problem("digits", split="class:1", clients=10, dtype="float64", l2=0.1)
    algorithm = build("sppm-as", clusters=3, cluster_by="labels", local_rounds=2)
    result = simulate(algorithm, problem, 5)
    labels = result.server["labels"]
    assert len(labels.unique()) == 3 and result.history[-1]["global_rounds"] == 2
    assert int(result.server["members"].sum()) == 3
    assert len(labels[result.server["members"]].unique()) == 3
    assert int((result.ledger.up_bytes > 0).sum()) == 10


def test_averaged_proximal_points_keep_their_bias_and_the_bound(logistic: Problem) -> None:
    """Thesis appendix D.2.4, FedProx-SPPM K = 1: E||x_t - x*||^2 <= A^t start + B/(1 - A)."""
    gamma, mu, optimum = 1.0, 0.1, minimise(logistic)
    algorithm = build("fedprox-sppm", sampling="full", local_rounds=1, gamma=gamma, tolerance=1e-10)
    result = simulate(algorithm, logistic, 40, optimum=optimum, evaluate_every=5)
    a = logistic.gradient(optimum)
    A = 1 / (1 + gamma * mu)
    B = gamma * float(a.square().sum(1).mean()) / ((1 + gamma * mu) * mu)
    start = float(optimum.square().sum())
    for record in result.history:
        assert record["distance"] ** 2 <= A ** record["round"] * start + B / (1 - A)
    long = simulate(algorithm, logistic, 300, optimum=optimum, evaluate_every=300)
    assert long.history[-1]["distance"] > 1e-3


def test_a_smaller_inner_step_brings_fedavg_sppm_nearer_to_the_proximal_point(
    logistic: Problem,
) -> None:
    x0 = normal(logistic.dimension)
    target = exact_prox(logistic, x0, 1.0, torch.full((6,), 1 / 6))
    away = []
    for alpha, rounds in ((1.0, 30), (0.1, 80), (0.02, 400)):
        algorithm = build(
            "fedavg-sppm", sampling="full", alpha=alpha, local_rounds=rounds, tolerance=1e-9
        )
        result = simulate(algorithm, logistic, rounds, x0=x0, evaluate_every=rounds)
        away.append(float((result.model - target).norm()))
    assert away[0] > 3 * away[1] > 6 * away[2]


def test_the_inner_step_of_fedavg_sppm_minimises_what_it_says(logistic: Problem) -> None:
    """`f_i(w) + ||w - x||^2 / (2 gamma) + ||w - z||^2 / (2 alpha)`, also when z has left x."""
    algorithm = build("fedavg-sppm", sampling="full", gamma=2.0, alpha=0.3, tolerance=1e-11)
    prepared = algorithm.prepare(logistic.constants())
    x, z = normal(2, 6, logistic.dimension)
    received = {"z": z, "first": torch.zeros(6, 1, dtype=torch.bool)}
    turn = Turn(1, 0, 6, torch.arange(6))
    _, message = prepared.client_step({"x": x}, received, logistic, turn)
    w = message["w"]
    assert isinstance(w, Tensor)
    slope = logistic.gradient(w) + (w - x) / 2.0 + (w - z) / 0.3
    assert float(slope.norm(dim=1).max()) < 1e-9


def test_costs_and_savings_of_the_paper() -> None:
    assert cost(10, 1) == 10
    assert 1 - cost(10, 1) / cost(1, 39) == pytest.approx(0.7436, abs=1e-4)
    hierarchical = 1 - cost(10, 1, 0.1, 1.0) / cost(1, 39, 0.1, 1.0)
    assert hierarchical == pytest.approx(0.9534, abs=1e-4)
    assert minibatch_step(2.0, 8.0, 10, 10) == pytest.approx(1 / 4)
    assert minibatch_step(2.0, 8.0, 10, 1) == pytest.approx(1 / 16)


def test_the_outlook_warns_where_more_rounds_cannot_pay(logistic: Problem) -> None:
    optimum = minimise(logistic)
    wide = outlook(logistic, make_sampling("uniform", 6), optimum, 1e-6)
    assert wide.warning is not None and "floor" in wide.warning
    calm = outlook(logistic, make_sampling("full", 6), optimum, 1e-3)
    assert calm.reach < 1e-12
    assert (calm.warning is None) == (calm.condition >= 10)


def test_a_network_trains_with_adam_workers() -> None:
    problem = make_problem("digits", model="mlp", split="dirichlet:0.3", clients=10)
    algorithm = build(
        "sppm-as",
        solver="local-adam",
        sampling="nice",
        cohort_size=5,
        step=0.01,
        gamma=100.0,
        batch=16,
    )
    result = simulate(algorithm, problem, 40, evaluate_every=20)
    assert result.history[-1]["accuracy"] > 0.6


def test_wrong_options_are_named(logistic: Problem) -> None:
    for options, culprit in (
        ({"gamma": 0.0}, "gamma"),
        ({"solver": "newton"}, "newton"),
        ({"sampling": "lottery"}, "lottery"),
        ({"cluster_by": "mood"}, "mood"),
        ({"local_rounds": 0}, "local_rounds"),
        ({"solver": "local-adam"}, "step"),
        ({"solver": "lbfgs", "batch": 8}, "batch"),
    ):
        with pytest.raises(SympruneError, match=culprit):
            simulate(build("sppm-as", **options), logistic, 1)
