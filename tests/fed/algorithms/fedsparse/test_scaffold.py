"""SCAFFOLD and FedSparse with SCAFFOLD: closed forms on parabolas, one round by hand, traffic."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from symprune.fed.algorithms import build
from symprune.fed.algorithms.fedsparse.fedsparse_scaffold import FedSparseScaffold
from symprune.fed.problems.losses import Linear
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.protocol import Turn
from symprune.fed.simulate import simulate

A = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
Y = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
STEPS = torch.tensor([3, 6, 9])
LOCAL = {"epochs": 3, "batch": 1, "lr": 0.1, "server_optimizer": "sgd"}
TUNED = {
    "cohort_size": 4,
    "batch": 8,
    "exempt": ("output",),
    "temperature": 3e-3,
    "gate_lr": 1e-2,
    "server_lr": 5e-3,
    "server_gate_lr": 2e-2,
}


@pytest.fixture(scope="module")
def parabolas() -> Problem:
    """`f_i(w) = a_i/2 (w - y_i)^2`, held as 1, 2 and 3 equal rows: as many steps per epoch."""
    parts = [
        (a.sqrt().view(1, 1).repeat(rows, 1), (a.sqrt() * y).repeat(rows))
        for a, y, rows in zip(A, Y, (1, 2, 3), strict=True)
    ]
    return Problem(Linear(1), stack_rows(parts), name="parabolas")


@pytest.fixture(scope="module")
def digits() -> Problem:
    return make_problem(
        "digits", model="mlp", split="dirichlet:0.3", clients=6, l2=0.0, client_test_share=0.25
    )


def test_the_variates_remove_the_bias_of_local_steps(parabolas: Problem) -> None:
    """FedAvg stops at `sum q_i y_i / sum q_i`, `q_i = 1 - (1 - lr a_i)^k_i`; SCAFFOLD goes on to
    the minimum, where c_i is the gradient of client i and c is zero."""
    q = 1 - (1 - 0.1 * A) ** STEPS
    biased, best = float((q * Y).sum() / q.sum()), float((A * Y).sum() / A.sum())
    assert abs(biased - best) > 0.2
    averaged = simulate(build("fedopt", **LOCAL), parabolas, 200, evaluate_every=200)
    assert float(averaged.model) == pytest.approx(biased, abs=1e-9)
    result = simulate(build("scaffold", **LOCAL), parabolas, 200, evaluate_every=200)
    assert float(result.model) == pytest.approx(best, abs=1e-9)
    assert torch.allclose(result.client["c"].squeeze(1), A * (best - Y), atol=1e-8)
    assert float(result.server["c"]) == pytest.approx(0, abs=1e-8)


def test_two_rounds_are_those_of_the_published_algorithm(parabolas: Problem) -> None:
    x, c, own = 0.0, 0.0, [0.0] * 3
    for _ in range(2):
        models, changes = [], []
        for i in range(3):
            w = x
            for _ in range(int(STEPS[i])):
                w -= 0.1 * (float(A[i]) * (w - float(Y[i])) - own[i] + c)
            new = own[i] - c + (x - w) / (int(STEPS[i]) * 0.1)
            models.append(w)
            changes.append(new - own[i])
            own[i] = new
        x += sum(w - x for w in models) / 3
        c += sum(changes) / 3
    result = simulate(build("scaffold", **LOCAL), parabolas, 2)
    assert float(result.model) == pytest.approx(x, abs=1e-12)
    assert float(result.server["c"]) == pytest.approx(c, abs=1e-12)
    assert result.client["c"].squeeze(1).tolist() == pytest.approx(own, abs=1e-12)


@pytest.mark.parametrize("name", ["scaffold", "fedsparse-scaffold"])
def test_the_servers_variate_is_the_mean_of_the_clients_also_with_cohorts(
    name: str, digits: Problem
) -> None:
    options = {} if name == "scaffold" else {"prune_at_server": False, "l0": 1e-4}
    result = simulate(build(name, cohort_size=2, batch=8, **options), digits, 5)
    mean = result.client["c"].mean(0)
    assert float(mean.norm()) > 0.01
    assert torch.allclose(result.server["c"], mean, atol=1e-6)


def test_open_gates_without_penalties_are_scaffold_bit_for_bit(digits: Problem) -> None:
    @dataclass(frozen=True)
    class Opened(FedSparseScaffold):
        def initial_gates(self, x0: Tensor) -> Tensor:
            return torch.full((self.groups.count,), -40.0)

    dense = simulate(build("scaffold", cohort_size=4, batch=8), digits, 3)
    opened = simulate(Opened(cohort_size=4, batch=8, l0=0.0, cross_entropy=0.0), digits, 3)
    assert torch.equal(opened.model, dense.model)
    assert torch.equal(opened.client["c"], dense.client["c"])
    plain = simulate(build("fedopt", cohort_size=4, batch=8), digits, 3)
    assert not torch.equal(dense.model, plain.model)


def test_variates_of_pruned_neurons_are_not_sent_and_change_nothing(digits: Problem) -> None:
    algorithm = build("fedsparse-scaffold", **TUNED).prepare(digits.constants())
    assert isinstance(algorithm, FedSparseScaffold)
    turn = Turn(3, 0, 6, torch.arange(6))
    server = algorithm.server_init(digits.initial(0), turn)
    alive = torch.arange(algorithm.groups.count) % 3 > 0
    server = algorithm.prune_groups({**server, "alive": alive})
    d, stream = digits.dimension, turn.stream("test")
    server["c"] = stream.normal(d)[0].float()
    client = {**algorithm.client_init(digits, turn), "c": stream.normal(d).float()}
    kept = algorithm.kept_weights(alive)
    message = algorithm.broadcast(server, turn)
    assert torch.equal(message["c"], server["c"][kept])  # type: ignore[arg-type]
    received = {name: t.expand(6, *t.shape) for name, t in message.items()}  # type: ignore[union-attr]
    after, reply = algorithm.client_step(client, received, digits, turn)
    assert reply["change"].shape == (6, int(kept.sum()))  # type: ignore[union-attr]
    assert torch.equal(after["c"][:, ~kept], client["c"][:, ~kept])
    assert not bool(after["w"][:, ~kept].any())
    other = {**client, "c": torch.where(kept, client["c"], 0.0)}
    _, same = algorithm.client_step(other, received, digits, turn)
    assert torch.equal(same["change"], reply["change"])  # type: ignore[arg-type]


def test_bits_are_those_of_fedsparse_and_twice_the_weights(digits: Problem) -> None:
    result = simulate(build("fedsparse-scaffold", l0=1e-5, **TUNED), digits, 12, evaluate_every=12)
    assert result.history[-1]["groups_pruned"] > 0.1
    algorithm, turn = result.algorithm, Turn(12, 0, 6, torch.arange(6))
    assert isinstance(algorithm, FedSparseScaffold)
    alive = result.server["alive"]
    kept = int(algorithm.kept_weights(alive).sum())
    before = result.ledger.down_bits.sum()
    more = simulate(build("fedsparse-scaffold", l0=1e-5, **TUNED), digits, 13, evaluate_every=13)
    down = 32 * (2 * kept + int(alive.sum())) + len(alive)
    assert int(more.ledger.down_bits.sum() - before) == 4 * down
    cohort = algorithm.cohort(result.server, turn)
    sent = (more.client["w"][cohort] != 0).sum(1)
    up = more.ledger.up_bits[cohort] - result.ledger.up_bits[cohort]
    assert up.tolist() == (32 * (sent + kept) + int(alive.sum())).tolist()
