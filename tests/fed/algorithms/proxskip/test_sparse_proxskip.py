"""ProxSkip and its sparse variants: who keeps the control variates' sum, and what that brings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.algorithms.proxskip.sparse_proxskip import ProxSkip
from symprune.fed.algorithms.shared.control_variates import control_variates
from symprune.fed.algorithms.shared.local_steps import local_steps
from symprune.fed.compressors import top_k
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.optimum import minimise
from symprune.fed.problems.problem import Problem
from symprune.fed.problems.quadratic import Quadratic, quadratic
from symprune.fed.protocol import Turn
from symprune.fed.simulate import Result, simulate

SOUND = (
    "proxskip",
    "randprox-l1",
    "sparse-proxskip",
    "sparse-proxskip-local",
    "accelerated-server-pruning-modified",
)
BROKEN = ("accelerated-server-pruning", "sparse-proxskip-modified")


@pytest.fixture(scope="module")
def digits() -> Problem:
    """Ten clients with two shards of the label-sorted digits each, softmax regression, d = 650."""
    return make_problem("digits", split="class:2", clients=10, l2=1e-3, dtype="float64")


@pytest.fixture(scope="module")
def ridge() -> Quadratic:
    """Clients that disagree: 8 quadratics in 10 dimensions."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(8, 15, 10, generator=generator, dtype=torch.float64)
    Q = a.transpose(1, 2) @ a / 15 + 0.1 * torch.eye(10, dtype=torch.float64)
    return quadratic(Q, torch.randn(8, 10, generator=generator, dtype=torch.float64))


def tuned(name: str, problem: Problem, **options: float) -> ProxSkip:
    gamma = 3 / problem.constants().L_max
    return build(name, gamma=gamma, p=0.2, **options)  # type: ignore[return-value]


def test_top_k_keeps_exactly_k_and_is_idempotent() -> None:
    v = torch.randn(40, 100, generator=torch.Generator().manual_seed(0))
    kept = top_k(v, 7)
    assert (torch.count_nonzero(kept, dim=1) == 7).all()
    assert torch.equal(kept[kept != 0], v[kept != 0]) and torch.equal(top_k(kept, 7), kept)
    smallest = torch.where(kept != 0, v.abs(), torch.inf).min(1).values
    assert (smallest >= torch.where(kept == 0, v.abs(), 0).max(1).values).all()


@pytest.mark.parametrize("name", SOUND)
def test_control_variates_sum_to_zero_where_they_must(name: str, digits: Problem) -> None:
    result = simulate(tuned(name, digits), digits, 15)
    assert max(result.series("h_sum")[1:]) <= 1e-9
    single = make_problem("digits", split="class:2", clients=10, l2=1e-3)
    assert max(simulate(tuned(name, single), single, 15).series("h_sum")[1:]) <= 1e-3


@pytest.mark.parametrize("name", BROKEN)
def test_control_variates_drift_where_the_paper_says_so(name: str, digits: Problem) -> None:
    assert min(simulate(tuned(name, digits), digits, 15).series("h_sum")[1:]) > 0.5


def test_proxskip_is_exact_where_fedavg_stalls(ridge: Quadratic) -> None:
    best = minimise(ridge)
    run = simulate(build("proxskip"), ridge, 400, evaluate_every=400, optimum=best)
    assert run.history[-1]["distance"] < 1e-8
    settings = run.algorithm
    assert isinstance(settings, ProxSkip)
    plain = build("fedavg", gamma=settings.gamma, p=settings.p)
    assert simulate(plain, ridge, 400, optimum=best).history[-1]["distance"] > 1e-3


def test_a_cohort_of_some_clients_is_exact_too(ridge: Quadratic) -> None:
    best = minimise(ridge)
    run = simulate(build("proxskip", cohort_size=4), ridge, 900, evaluate_every=900, optimum=best)
    assert run.history[-1]["distance"] < 1e-8 and run.history[-1]["h_sum"] < 1e-9


def test_randprox_reaches_the_lasso_solution(ridge: Quadratic) -> None:
    step, lam = 1 / ridge.constants().L_f, 0.05
    w = torch.zeros(10, dtype=torch.float64)
    for _ in range(8000):
        w = w - step * ridge.mean_gradient(w)
        w = w.sign() * (w.abs() - step * lam).clamp_min(0)
    run = simulate(build("randprox-l1", l1=lam), ridge, 700, evaluate_every=700)
    assert (run.model - w).norm() < 1e-8
    assert 0 < int((w != 0).sum()) < 10


def test_keeping_everything_makes_all_variants_proxskip(digits: Problem) -> None:
    plain = simulate(tuned("proxskip", digits), digits, 8).server["x"]
    for name in ("sparse-proxskip", "sparse-proxskip-local", "accelerated-server-pruning"):
        result = simulate(tuned(name, digits, sparsity=0.0), digits, 8)
        assert torch.equal(result.server["x"], plain)


def test_with_one_local_step_pruning_before_the_upload_or_after_the_step_is_the_same(
    digits: Problem,
) -> None:
    runs = [
        simulate(replace(tuned(name, digits), p=1.0), digits, 12)
        for name in ("sparse-proxskip", "sparse-proxskip-local")
    ]
    assert torch.equal(runs[0].server["x"], runs[1].server["x"])


def test_one_client_alone_has_no_control_variate(digits: Problem) -> None:
    alone = replace(digits.select(slice(0, 1)), ids=None)
    for name in ("sparse-proxskip", "sparse-proxskip-local"):
        result = simulate(tuned(name, alone), alone, 6)
        assert float(control_variates(result.algorithm, result.server, result.client).norm()) == 0  # type: ignore[arg-type]


def test_an_optimum_is_a_fixed_point_only_if_the_control_variates_sum_to_zero(
    ridge: Quadratic,
) -> None:
    best = minimise(ridge)
    algorithm = build("proxskip", p=1.0).prepare(ridge.constants())
    assert isinstance(algorithm, ProxSkip)
    turn = Turn(0, 0, 8, torch.arange(8))
    client = algorithm.client_init(ridge, turn)
    h = torch.randn(8, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    received = {"x": best.expand(8, -1)}
    _, message = algorithm.client_step({**client, "h": h}, received, ridge, turn)
    mean = message["what"].tensor.mean(0)  # type: ignore[union-attr]
    assert (mean - (best + algorithm.gamma * h.mean(0))).abs().max() < 1e-10


def test_uploads_are_counted_as_the_paper_does_and_hold_at_most_k_values(digits: Problem) -> None:
    sparse = simulate(tuned("sparse-proxskip", digits), digits, 9)
    dense = simulate(tuned("accelerated-server-pruning", digits), digits, 9)
    assert sparse.ledger.up_bits.tolist() == [32 * 65 * 9] * 10
    assert dense.ledger.up_bits.tolist() == [32 * 650 * 9] * 10
    # K float64 values, a mask of 650 bits, 1 + 3 bytes of form and shape, 6 of the message.
    assert sparse.ledger.up_bytes.tolist() == [9 * (65 * 8 + 82 + 4 + 6)] * 10
    for name in ("sparse-proxskip", "sparse-proxskip-local", "fediht"):
        result = simulate(tuned(name, digits), digits, 5)
        assert int(torch.count_nonzero(result.model)) <= 65
        turn, x = Turn(5, 0, 10, torch.arange(10)), result.server["x"]
        received = {"x": x.expand(10, -1)}
        _, message = result.algorithm.client_step(result.client, received, digits, turn)
        (upload,) = message.values()
        assert torch.count_nonzero(upload.tensor, dim=1).tolist() == [65] * 10  # type: ignore[union-attr]


def test_every_method_sees_the_same_coin() -> None:
    turns = [Turn(t, 3, 10, torch.arange(10)) for t in range(400)]
    steps = [local_steps(0.2, turn) for turn in turns]
    assert steps == [local_steps(0.2, turn.about(torch.tensor([4]))) for turn in turns]
    assert abs(sum(steps) / len(steps) - 5) < 0.6 and min(steps) == 1
    assert local_steps(0.2, turns[0], random=False) == 5 and local_steps(1.0, turns[0]) == 1


def accuracy(result: Result) -> float:
    tail = result.series("accuracy")[-5:]
    return sum(tail) / len(tail)


def bits_to(result: Result, level: float) -> float:
    record = result.first("accuracy", level)
    return float("inf") if record is None else record["paper_bits_up"]


def test_pruning_at_the_clients_beats_pruning_at_the_server(digits: Problem) -> None:
    """90 % sparsity, 150 rounds, gamma = 3/L, p = 0.2."""
    names = (
        "sparse-proxskip",
        "accelerated-server-pruning",
        "accelerated-server-pruning-modified",
        "fedht",
        "final-topk",
        "sparse-proxskip-modified",
    )
    runs = {n: simulate(tuned(n, digits), digits, 150, evaluate_every=2) for n in names}
    ours = accuracy(runs["sparse-proxskip"])
    assert ours > 0.86
    assert ours > accuracy(runs["accelerated-server-pruning"]) + 0.02
    assert ours > accuracy(runs["fedht"]) + 0.02
    assert ours > accuracy(runs["final-topk"]) + 0.15
    assert ours > accuracy(runs["sparse-proxskip-modified"]) + 0.2
    cost = bits_to(runs["sparse-proxskip"], 0.8)
    for dense in ("accelerated-server-pruning", "accelerated-server-pruning-modified", "fedht"):
        assert cost <= bits_to(runs[dense], 0.8) / 5


@pytest.mark.slow
def test_a_network_pruned_at_the_server_drifts_off_and_at_the_clients_does_not() -> None:
    """MLP 64-64-10, batch 32, lr 0.1, clip 10, p = 1/16, 90 % sparsity, means of three seeds."""
    problem = make_problem("digits", model="mlp", split="class:2", clients=10, l2=1e-4)

    def last(name: str, metric: str) -> float:
        algorithm = build(name, gamma=0.1, p=1 / 16, batch=32, clip=10.0)
        runs = [simulate(algorithm, problem, 80, seed=s, evaluate_every=80) for s in range(3)]
        return sum(run.history[-1][metric] for run in runs) / 3

    assert last("accelerated-server-pruning", "loss") > 2.4  # 2.3 at the start
    assert last("sparse-proxskip", "accuracy") >= 0.9
    assert last("accelerated-server-pruning", "accuracy") <= 0.6


def test_bad_settings_are_named(digits: Problem) -> None:
    for options, culprit in (
        ({"sparsity": 1.0}, "Sparsity 1.0"),
        ({"gamma": -1.0}, "gamma = -1.0"),
        ({"p": 1.5}, "p = 1.5"),
        ({"cohort_size": 11}, "11 of 10"),
    ):
        with pytest.raises(SympruneError, match=culprit):
            simulate(build("sparse-proxskip", **options), digits, 1)
    network = make_problem("digits", model="mlp", clients=4)
    with pytest.raises(SympruneError, match="needs the option gamma"):
        simulate(build("proxskip"), network, 1)
