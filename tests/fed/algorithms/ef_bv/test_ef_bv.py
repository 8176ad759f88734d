"""EF-BV, EF21 and DIANA: the theory's numbers, the special cases and the promised rates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.algorithms.ef_bv.ef_bv import EF21, EFBV, largest_step, remainder
from symprune.fed.compressors import Comp, CompressionConstants, best_scaling, top_k
from symprune.fed.problems.datasets import breast_cancer
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.optimum import minimise
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import State, Turn
from symprune.fed.simulate import Result, simulate

# dimension, k -> lam*, r, r_av, sqrt(r_av/r), s* of Table A.2 (n = 1000, k' = floor(d/2))
TABLE = {
    (112, 1): (5.32e-3, 0.998, 0.555, 0.746, 3.90e-4),
    (112, 2): (1.08e-2, 0.997, 0.527, 0.727, 7.94e-4),
    (68, 1): (8.85e-3, 0.997, 0.533, 0.731, 6.50e-4),
    (68, 2): (1.82e-2, 0.995, 0.516, 0.720, 1.34e-3),
    (123, 1): (4.83e-3, 0.999, 0.564, 0.752, 3.50e-4),
    (123, 2): (9.80e-3, 0.997, 0.534, 0.731, 7.13e-4),
    (300, 1): (1.96e-3, 0.999, 0.649, 0.806, 1.44e-4),
    (300, 2): (3.95e-3, 0.999, 0.574, 0.758, 2.90e-4),
}


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem("breast-cancer", clients=50, l2=0.1, dtype="float64")


@pytest.fixture(scope="module")
def optimum(problem: Problem) -> Tensor:
    return minimise(problem)


@pytest.mark.parametrize(("d", "k"), TABLE)
def test_the_parameters_are_those_of_the_papers_table(d: int, k: int) -> None:
    lam, r, r_av, ratio, s = TABLE[d, k]
    noise = Comp(k, d // 2).constants(d)
    omega_av = noise.omega / 1000
    assert noise.best_scaling == pytest.approx(lam, rel=5e-3)
    assert best_scaling(noise.eta, omega_av) == 1
    assert remainder(noise.best_scaling, noise.eta, noise.omega) == pytest.approx(r, abs=6e-4)
    assert remainder(1, noise.eta, omega_av) == pytest.approx(r_av, abs=6e-4)
    exact = remainder(noise.best_scaling, noise.eta, noise.omega)
    exact_av = remainder(1, noise.eta, omega_av)
    assert math.sqrt(exact_av / exact) == pytest.approx(ratio, abs=6e-4)
    assert math.sqrt((1 + exact) / (2 * exact)) - 1 == pytest.approx(s, rel=4e-3)
    steps = [largest_step(0, 1, exact, average, False) for average in (exact_av, exact)]
    assert steps[0] / steps[1] == pytest.approx(math.sqrt(exact / exact_av))


@pytest.mark.parametrize("name", ["ef-bv", "ef21"])
def test_the_servers_h_is_the_mean_of_the_clients(name: str, problem: Problem) -> None:
    result = simulate(build(name), problem, 300, evaluate_every=300)
    assert (result.server["h"] - result.client["h"].mean(0)).abs().max() < 1e-10


def test_participation_of_some_keeps_the_mean_and_converges(
    problem: Problem, optimum: Tensor
) -> None:
    algorithm = build("diana", compressor="rand-k:10", cohort_size=10)
    result = simulate(algorithm, problem, 1000, evaluate_every=1000, optimum=optimum)
    assert (result.server["h"] - result.client["h"].mean(0)).abs().max() < 1e-10
    assert result.history[-1]["gap"] < 1e-8
    assert int((result.ledger.up_bytes > 0).sum()) == 50


def ef21_by_hand(problem: Problem, k: int, gamma: float, rounds: int) -> Tensor:
    """x <- x - gamma mean g_i;  g_i <- g_i + C(grad f_i(x) - g_i), starting from g_i = 0."""
    x = problem.initial()
    g = torch.zeros(problem.clients, problem.dimension, dtype=torch.float64)
    for _ in range(rounds):
        g = g + top_k(problem.gradient(x) - g, k)
        x = x - gamma * g.mean(0)
    return x


def test_unit_scalings_are_ef21(problem: Problem) -> None:
    result = simulate(build("ef-bv", compressor="top-k:3", lam=1.0, nu=1.0, gamma=0.5), problem, 60)
    assert (result.model - ef21_by_hand(problem, 3, 0.5, 60)).abs().max() < 1e-12
    named = simulate(build("ef21", compressor="top-k:3", gamma=0.5), problem, 60)
    assert torch.equal(named.model, result.model)


def test_unit_nu_is_diana(problem: Problem) -> None:
    lam = 1 / 10
    same = build("ef-bv", compressor="rand-k:3", lam=lam, nu=1.0, gamma=0.7)
    diana = simulate(build("diana", compressor="rand-k:3", gamma=0.7), problem, 60)
    assert torch.equal(diana.model, simulate(same, problem, 60).model)
    assert diana.algorithm.lam == pytest.approx(lam)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["ef-bv", "ef21", "diana", "dcgd"])
def test_without_compression_it_is_gradient_descent(name: str, problem: Problem) -> None:
    result = simulate(build(name, compressor="identity", gamma=1.0), problem, 50)
    plain = simulate(build("gd", gamma=1.0), problem, 50)
    assert (result.model - plain.model).abs().max() < 1e-12


def with_error(base: type[EFBV], problem: Problem) -> type[EFBV]:
    """The algorithm, with mean ||grad f_i(x) - h_i||^2 in its history."""

    @dataclass(frozen=True)
    class Watched(base):  # type: ignore[valid-type, misc]
        seen: ClassVar[Problem] = problem

        def metrics(self, server: State, client: State) -> dict[str, float]:
            error = self.seen.gradient(server["x"]) - client["h"]
            return {"error": float(error.square().sum(1).mean())}

    return Watched


@pytest.mark.parametrize("base", [EFBV, EF21])
def test_it_converges_linearly_at_the_theorems_rate(
    base: type[EFBV], problem: Problem, optimum: Tensor
) -> None:
    algorithm = with_error(base, problem)(compressor="comp:8,15")
    run = simulate(algorithm, problem, 1200, evaluate_every=50, optimum=optimum)
    done, constants = run.algorithm, problem.constants()
    assert isinstance(done, EFBV) and done.lam and done.nu and done.gamma
    noise, omega_av = done.noise(constants)
    r = remainder(done.lam, noise.eta, noise.omega)
    r_av = remainder(done.nu, noise.eta, omega_av if base is EFBV else noise.omega)
    s = math.sqrt((1 + r) / (2 * r)) - 1
    theta = s * (1 + s) * r / r_av
    rate = max(1 - done.gamma * constants.mu_min, (r + 1) / 2)
    psi = [h["gap"] + done.gamma / (2 * theta) * h["error"] for h in run.history]
    for record, value in zip(run.history, psi, strict=True):
        assert value <= rate ** record["round"] * psi[0] + 1e-14
    assert run.history[-1]["gap"] < 1e-10


def test_diana_with_its_own_step_converges_fast(problem: Problem, optimum: Tensor) -> None:
    algorithm = build("diana", compressor="rand-k:3")
    run = simulate(algorithm, problem, 1500, evaluate_every=1500, optimum=optimum)
    slow = build("ef-bv", compressor="rand-k:3").prepare(problem.constants())
    assert run.history[-1]["gap"] < 1e-12
    assert run.algorithm.gamma > 4 * slow.gamma  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["ef-bv", "diana"])
def test_a_biased_compressor_has_a_scaling_and_a_step(name: str, problem: Problem) -> None:
    """DIANA's 1/(1 + omega) would leave r >= 1 with comp-(1, 15); lam* never does."""
    done = build(name, compressor="comp:1,15").prepare(problem.constants())
    assert isinstance(done, EFBV) and done.lam and done.gamma
    noise = Comp(1, 15).constants(30)
    assert remainder(1 / (1 + noise.omega), noise.eta, noise.omega) > 1
    assert done.lam == noise.best_scaling
    losses = simulate(done, problem, 60, evaluate_every=60).series("loss")
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("name", "compressor"), [("ef-bv", "comp:8,15"), ("diana", "rand-k:10")])
def test_with_an_l1_term_it_reaches_the_proximal_gradient_solution(
    name: str, compressor: str, problem: Problem
) -> None:
    x = problem.initial()
    for _ in range(400):
        x = x - 2 * problem.mean_gradient(x)
        x = x.sign() * (x.abs() - 2 * 0.01).clamp_min(0)
    algorithm = build(name, compressor=compressor, l1=0.01)
    run = simulate(algorithm, problem, 1500, evaluate_every=1500)
    assert torch.equal(run.model != 0, x != 0)
    assert (run.model - x).abs().max() < 1e-6


def test_an_l1_term_leaves_diana_its_own_step(problem: Problem) -> None:
    """Proposition 2.4.6 is about f + R; Theorem 2.4.2's step has 2 L."""
    steps = {
        (name, l1): build(name, compressor="rand-k:3", l1=l1).prepare(problem.constants()).gamma  # type: ignore[attr-defined]
        for name in ("diana", "ef-bv")
        for l1 in (0.0, 0.01)
    }
    assert steps["diana", 0.01] == steps["diana", 0.0]
    assert steps["ef-bv", 0.01] < steps["ef-bv", 0.0]


@pytest.mark.parametrize("name", ["ef-bv", "ef21", "diana"])
def test_the_default_compressor_costs_fewer_bytes_than_the_others(name: str) -> None:
    """With the theorems' steps; for the same bytes nobody else is there."""
    double, problem = (
        make_problem("breast-cancer", clients=50, l2=0.01, dtype=dtype)
        for dtype in ("float64", "float32")
    )
    goal = minimise(double).float()
    target = 1e-3 * (problem.mean_value(problem.initial()) - problem.mean_value(goal))
    run = partial(simulate, problem=problem, rounds=400, optimum=goal)
    ours = run(build(name), stop=lambda record: bool(record["gap"] < target)).history[-1]
    assert ours["gap"] < target
    for other in ("identity", "comp:1,0.5", "rand-k:0.1", "top-k:0.1"):
        algorithm = build(name, compressor=other)
        spent = run(algorithm, stop=lambda record: bool(record["bytes_up"] > ours["bytes_up"]))
        assert spent.history[-1]["gap"] > target, other


def test_without_feedback_top_1_stalls_and_with_it_does_not(
    problem: Problem, optimum: Tensor
) -> None:
    naive = simulate(
        build("dcgd", compressor="top-k:1", gamma=0.2),
        problem,
        600,
        evaluate_every=20,
        optimum=optimum,
    )
    feedback = simulate(
        build("ef21", compressor="top-k:1"), problem, 1500, evaluate_every=1500, optimum=optimum
    )
    assert min(naive.series("gap")[-15:]) > 1e-3
    assert feedback.history[-1]["gap"] < 1e-4


def test_a_nonconvex_problem_meets_its_bound() -> None:
    problem = make_problem("breast-cancer", clients=50, l2=0.0, nonconvex=0.1, dtype="float64")
    algorithm = with_error(EFBV, problem)(compressor="comp:3,15", nonconvex=True)
    run = simulate(algorithm, problem, 400)
    done = run.algorithm
    assert isinstance(done, EFBV) and done.lam and done.nu and done.gamma
    noise, omega_av = done.noise(problem.constants())
    r = remainder(done.lam, noise.eta, noise.omega)
    s = 1 / math.sqrt(r) - 1
    theta = s * (1 + s) * r / remainder(done.nu, noise.eta, omega_av)
    mean = sum(h["gradient_norm"] ** 2 for h in run.history[:-1]) / 400
    first = run.history[0]
    assert mean <= 2 * first["loss"] / (done.gamma * 400) + first["error"] / (theta * 400)


def test_many_workers_make_ef_bv_cheaper_than_ef21() -> None:
    """250 nodes of two points, comp-(2, 15): EF-BV needs at most 0.85 times EF21's bits."""
    data = breast_cancer()
    rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:500]
    problem = make_problem(data.take(rows), clients=250, l2=0.1, dtype="float64")
    optimum = minimise(problem)

    def run(name: str) -> Result:
        return simulate(
            build(name, compressor="comp:2,15"),
            problem,
            2000,
            evaluate_every=25,
            optimum=optimum,
            stop=lambda record: bool(record["gap"] < 1e-3),
        )

    ours, theirs = run("ef-bv"), run("ef21")
    assert ours.algorithm.gamma == pytest.approx(1.62e-2, rel=0.02)  # type: ignore[attr-defined]
    assert theirs.algorithm.gamma == pytest.approx(1.18e-2, rel=0.02)  # type: ignore[attr-defined]
    for gap in (1e-2, 1e-3):
        a, b = ours.first("gap", gap, falling=True), theirs.first("gap", gap, falling=True)
        assert a is not None and b is not None
        assert a["paper_bits_up"] <= 0.85 * b["paper_bits_up"]
        assert a["paper_bits_up"] == 32 * 2 * a["round"]
        assert a["bytes_up"] <= 0.85 * b["bytes_up"]


def test_scalings_outside_their_range_are_refused(problem: Problem) -> None:
    with pytest.raises(SympruneError, match=r"lam = 1\.5"):
        simulate(build("ef-bv", lam=1.5), problem, 1)
    with pytest.raises(SympruneError, match="below 1"):
        simulate(build("ef-bv", compressor="comp:1,15", lam=1.0), problem, 1)


def test_one_step_of_the_server_is_the_papers() -> None:
    """g = h + nu d with the old h, x - gamma g, h + lam d; d is the mean over all n workers."""
    algorithm = EFBV(lam=0.5, nu=0.25, gamma=0.1)
    server = {"x": torch.tensor([1.0, 2.0]), "h": torch.tensor([0.5, -0.5])}
    replies = {"d": torch.tensor([[4.0, 0.0], [0.0, 8.0]])}
    after = algorithm.server_step(server, replies, Turn(0, 0, 2, torch.arange(2)))
    d = torch.tensor([2.0, 4.0])
    torch.testing.assert_close(after["x"], server["x"] - 0.1 * (server["h"] + 0.25 * d))
    torch.testing.assert_close(after["h"], server["h"] + 0.5 * d)


def test_nu_is_chosen_for_the_noise_of_the_mean() -> None:
    noise = CompressionConstants(0.5, 4.0, 5.0)
    lam, nu = EFBV().scalings(noise, 0.1)
    assert lam == pytest.approx(0.5 / (0.25 + 4.0)) and nu == 1.0
    assert EFBV().scalings(noise, 0.5)[1] == pytest.approx(0.5 / 0.75)
