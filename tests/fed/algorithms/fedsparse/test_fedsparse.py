"""FedSparse: gates, gradients, hard EM, pruning and exact traffic (An EM perspective on FL)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.algorithms.fedsparse.em import weight_groups
from symprune.fed.algorithms.fedsparse.fedsparse import FedSparse
from symprune.fed.algorithms.fedsparse.gates import (
    gate_logit,
    hard_concrete,
    initial_threshold,
    open_chance,
    penalty_slope,
    server_directions,
    threshold_slope,
)
from symprune.fed.algorithms.fedsparse.server_optimizers import ascend, moments
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.losses import Linear, Module, cross_entropy
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.protocol import Turn
from symprune.fed.randomness import Stream
from symprune.fed.simulate import Result, simulate

TUNED = {
    "cohort_size": 5,
    "batch": 8,
    "exempt": ("output",),
    "temperature": 3e-3,
    "gate_lr": 1e-2,
    "server_lr": 5e-3,
    "server_gate_lr": 2e-2,
}


@pytest.fixture(scope="module")
def digits() -> Problem:
    return make_problem(
        "digits", model="mlp", split="dirichlet:0.5", clients=10, l2=0.0, client_test_share=0.25
    )


@pytest.fixture(scope="module")
def sparse(digits: Problem) -> Result:
    return simulate(build("fedsparse", l0=1e-5, **TUNED), digits, 25, evaluate_every=5)


def test_neurons_own_their_incoming_weights_and_bias() -> None:
    names = ("1.weight", "1.bias", "norm.weight", "3.weight", "3.bias")
    shapes = ((2, 3), (2,), (2,), (2, 2), (2,))
    layout = FlatLayout(names, shapes)
    groups = weight_groups(layout, "neuron")
    assert groups.of.tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 4, 4, 2, 2, 3, 3, 2, 3]
    assert groups.sizes.tolist() == [4, 4, 3, 3]
    without = weight_groups(layout, "neuron", ("output",))
    assert without.count == 2 and int(without.exempt.sum()) == 8
    single = weight_groups(layout, "weight", ("3",))
    assert single.count == 8 and single.sizes.tolist() == [1] * 8
    with pytest.raises(SympruneError, match="head"):
        weight_groups(layout, "neuron", ("head",))


def test_open_gates_without_penalties_are_fedavg_bit_for_bit(digits: Problem) -> None:
    dense = simulate(build("fedopt", cohort_size=4, batch=8), digits, 2)

    @dataclass(frozen=True)
    class Opened(FedSparse):
        def initial_gates(self, x0: Tensor) -> Tensor:
            return torch.full((self.groups.count,), -40.0)

    opened = Opened(cohort_size=4, batch=8, l0=0.0, cross_entropy=0.0)
    result = simulate(opened, digits, 2)
    assert torch.equal(result.model, dense.model)
    assert result.history[-1]["sparsity"] == 0


def test_a_plain_server_step_is_the_mean_of_the_local_models(digits: Problem) -> None:
    algorithm = build("fedopt", server_optimizer="sgd", batch=16)
    result = simulate(algorithm, digits, 1)
    assert torch.allclose(result.model, result.client["w"].mean(0), atol=1e-6)


def test_server_directions_are_the_gradient_of_the_bound() -> None:
    g = torch.Generator().manual_seed(0)
    groups, T = torch.tensor([0, 0, 1, 1, 2]), 0.5
    w, v = torch.randn(5, generator=g).double(), torch.randn(3, generator=g).double()
    w_s = torch.randn(4, 5, generator=g).double()
    z = (torch.rand(4, 3, generator=g) < 0.6).double()
    free_w, free_v = w.clone().requires_grad_(), v.clone().requires_grad_()
    norm = torch.stack([w[groups == j].norm() for j in range(3)])
    logit = gate_logit(norm, free_v, T)
    theta = torch.sigmoid(logit)
    bound = (z * theta.log() + (1 - z) * (1 - theta).log()).sum()
    bound = bound - 0.5 * (z[:, groups] * (w_s - free_w).square()).sum()
    bound.backward()
    got_w, got_v = server_directions(z, w_s, w, z[:, groups], logit.detach(), v, T)
    assert torch.allclose(got_w, free_w.grad, rtol=1e-5)
    assert torch.allclose(got_v, free_v.grad, rtol=1e-5)


def test_thresholds_rise_when_every_client_closes_its_gate() -> None:
    w, v = torch.ones(1), torch.zeros(1)
    logit = gate_logit(w.norm().view(1), v, 0.5)
    _, direction = server_directions(torch.zeros(3, 1), torch.zeros(3, 1), w, torch.zeros(3, 1), logit, v, 0.5)  # fmt: skip  # noqa: E501
    after, _ = ascend("adamax", v, direction, moments(v, "v"), "v", 0.01)
    assert float(after) > float(v)
    assert float(gate_logit(w.norm().view(1), after, 0.5)) < float(logit)


@pytest.mark.parametrize(
    ("log_alpha", "chance"), [(-3.0, 0.198), (0.0, 0.832), (2.0, 0.973), (4.6, 0.998)]
)
def test_the_chance_of_an_open_hard_concrete_gate(log_alpha: float, chance: float) -> None:
    count = 40_000
    u = Stream.of(0, 0, "u").uniform(count)[0]
    z, _ = hard_concrete(torch.full((count,), log_alpha, dtype=torch.float64), u)
    expected = float(open_chance(torch.tensor(log_alpha)))
    assert expected == pytest.approx(chance, abs=6e-4)
    error = (expected * (1 - expected) / count) ** 0.5
    assert float((z > 0).double().mean()) == pytest.approx(expected, abs=3.5 * error)


def test_gate_derivatives_agree_with_autograd() -> None:
    u = Stream.of(0, 0, "u").uniform(200)[0]
    log_alpha = torch.linspace(-4, 4, 200, dtype=torch.float64, requires_grad=True)
    z, slope = hard_concrete(log_alpha, u)
    (got,) = torch.autograd.grad(z.sum(), log_alpha)
    assert torch.allclose(got, slope.detach(), atol=1e-10)
    v = torch.linspace(-3, 3, 50, dtype=torch.float64, requires_grad=True)
    norm, sizes, l0, T = torch.ones(50).double(), torch.full((50,), 7.0), 0.01, 0.3
    (got,) = torch.autograd.grad((l0 * sizes * open_chance(gate_logit(norm, v, T))).sum(), v)
    slope = penalty_slope(gate_logit(norm, v, T), torch.zeros(50), sizes, torch.zeros(50), l0, 0.0)
    assert torch.allclose(got, (slope * threshold_slope(v, T)).detach(), atol=1e-12)
    chance = open_chance(gate_logit(norm, v, T))
    by_hand = -l0 * 7 * chance * (1 - chance) * torch.sigmoid(v) / T
    assert torch.allclose(got, by_hand.detach(), atol=1e-12)


def test_training_gradients_agree_with_autograd_of_the_whole_local_loss(digits: Problem) -> None:
    """One batch of everything, so one step of SGD shows the gradient; gates must not reach w."""
    options = {**TUNED, "l0": 0.01, "cross_entropy": 0.02, "pull": 0.3, "batch": 10_000}
    alone = digits.select(slice(0, 1))
    algorithm = build("fedsparse", **{**options, "temperature": 0.5, "theta": 0.7})
    algorithm = algorithm.prepare(digits.constants())
    assert isinstance(algorithm, FedSparse)
    turn = Turn(0, 0, 10, torch.arange(1))
    x = digits.initial(0).unsqueeze(0)
    v = algorithm.initial_gates(x[0]).unsqueeze(0)
    alive = torch.ones(v.shape[1], dtype=torch.bool)
    w_after, v_after = algorithm._train(x, v, alive, alone, turn)
    w, free_v = x.clone().requires_grad_(), v.clone().requires_grad_()
    groups = algorithm.groups
    log_alpha = algorithm.logit(w.detach(), free_v)
    z, _ = hard_concrete(log_alpha, turn.stream("noise 0").uniform(groups.count))
    loss = alone.value(w * groups.spread(z)).sum()
    price = 0.01 * groups.sizes - 0.02 * algorithm.logit(x, v)
    loss = loss + (open_chance(log_alpha) * price).sum()
    loss.backward()
    assert w.grad is not None and free_v.grad is not None
    assert torch.allclose((x - w_after) / algorithm.lr, w.grad, atol=1e-4)
    assert torch.equal((v - v_after).sign(), free_v.grad.sign())
    assert torch.allclose((v - v_after).abs(), torch.full_like(v, algorithm.gate_lr), rtol=1e-2)


def test_gates_start_at_the_asked_probability_and_nothing_is_pruned_at_once(
    digits: Problem,
) -> None:
    norm = torch.tensor([0.005, 0.5, 3.0], dtype=torch.float64)
    v = initial_threshold(norm, 1e-3, 0.99)
    assert torch.allclose(torch.sigmoid(gate_logit(norm, v, 1e-3)), torch.tensor(0.99).double(), atol=1e-4)  # fmt: skip  # noqa: E501
    first = simulate(build("fedsparse", **TUNED), digits, 0).history[0]
    assert first["sparsity"] == 0


def test_pruned_neurons_are_zero_are_not_sent_and_never_return(
    digits: Problem, sparse: Result
) -> None:
    pruned = sparse.series("groups_pruned")
    assert pruned == sorted(pruned) and 0.2 < pruned[-1] < 1
    algorithm, server = sparse.algorithm, sparse.server
    assert isinstance(algorithm, FedSparse)
    dead = ~algorithm.groups.spread(server["alive"].unsqueeze(0))[0].bool()
    assert int(dead.sum()) > 0 and not bool(server["x"][dead].any())
    message = algorithm.broadcast(server, Turn(0, 0, 10, torch.arange(10)))
    weights = message["w"]
    assert isinstance(weights, Tensor) and len(weights) == int((~dead).sum())


def test_the_model_without_its_dead_neurons_predicts_the_same(
    digits: Problem, sparse: Result
) -> None:
    parts = digits.layout.split(sparse.model)
    alive = sparse.server["alive"]
    small = nn.Sequential(
        nn.Linear(64, int(alive.sum())), nn.ReLU(), nn.Linear(int(alive.sum()), 10)
    )
    with torch.no_grad():
        for place, name, value in (
            (0, "weight", parts["1.weight"][alive]),
            (0, "bias", parts["1.bias"][alive]),
            (2, "weight", parts["3.weight"][:, alive]),
            (2, "bias", parts["3.bias"]),
        ):
            getattr(small[place], name).copy_(value)
        assert digits.test is not None
        x = digits.test.x[0]
        assert torch.equal(small(x).argmax(1).float(), digits.loss.predict(sparse.model[None], digits.test.x)[0])  # fmt: skip  # noqa: E501


def test_a_higher_price_prunes_more_and_sends_less(digits: Problem, sparse: Result) -> None:
    free = simulate(build("fedsparse", l0=0.0, **TUNED), digits, 25, evaluate_every=25)
    dense = simulate(
        build("fedopt", cohort_size=5, batch=8, server_lr=5e-3), digits, 25, evaluate_every=25
    )
    last = sparse.history[-1]
    assert last["sparsity"] > free.history[-1]["sparsity"]
    assert last["paper_bits_up"] < free.history[-1]["paper_bits_up"]
    assert last["bytes_up"] + last["bytes_down"] < 0.95 * (
        dense.history[-1]["bytes_up"] + dense.history[-1]["bytes_down"]
    )
    assert last["accuracy"] > dense.history[-1]["accuracy"] - 0.06
    assert "personal_accuracy" in last


def test_several_epochs_give_a_client_the_same_bits_alone_as_in_a_stack(digits: Problem) -> None:
    algorithm = build("fedsparse", epochs=2, l0=1e-4, **TUNED)
    together = simulate(algorithm, digits, 2)
    apart = simulate(algorithm, digits, 2, clients_at_once=1, wire=True)
    assert torch.equal(together.model, apart.model)
    assert torch.equal(together.client["w"], apart.client["w"])


def two_neurons(clients: int) -> Problem:
    """Two groups of three weights and a bias-free output layer of one weight that is exempt."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden(x) * self.scale

    g = torch.Generator().manual_seed(0)
    parts = [(torch.randn(4, 2, generator=g), torch.tensor([0.0, 1, 0, 1])) for _ in range(clients)]
    return Problem(Module(Tiny, cross_entropy), stack_rows(parts), name="tiny")


def test_bits_are_counted_as_in_the_paper() -> None:
    problem = two_neurons(2)
    algorithm = build("fedsparse").prepare(problem.constants())
    assert isinstance(algorithm, FedSparse)
    assert algorithm.groups.sizes.tolist() == [3, 3] and int(algorithm.groups.exempt.sum()) == 1
    result = simulate(algorithm, problem, 1)
    down = 32 * (6 + 2 + 1) + 2
    assert result.ledger.down_bits.tolist() == [down, down]
    sent = (result.client["w"] != 0).sum(1)
    assert result.ledger.up_bits.tolist() == (32 * sent + 2).tolist()
    state = {**result.server, "alive": torch.tensor([True, False])}
    message = algorithm.broadcast(state, Turn(1, 0, 2, torch.arange(2)))
    assert [len(message[k]) for k in ("alive", "w", "v")] == [2, 4, 1]  # type: ignore[arg-type]


def test_fedavg_costs_the_gigabytes_of_the_paper(digits: Problem) -> None:
    """Measured per weight, client and round, times the three networks of the paper."""
    result = simulate(build("fedopt", cohort_size=4, batch=64), digits, 2, evaluate_every=2)
    sent = int((result.ledger.up_bits + result.ledger.down_bits).sum()) / 8
    each = sent / (digits.dimension * 4 * 2)
    for weights, rounds, gib in (
        (878_538, 1000, 65.5),
        (608_702, 6000, 272.1),
        (278_324, 6000, 124.4),
    ):
        assert each * weights * 10 * rounds / 2**30 == pytest.approx(gib, abs=0.06)


@pytest.mark.parametrize("name", ["fedsparse", "fedsparse-em"])
def test_single_weight_gates_prune_single_weights(name: str) -> None:
    problem = make_problem("digits", model="mlp", clients=5, l2=0.0)
    tuned = {k: v for k, v in TUNED.items() if k in ("batch", "exempt", "gate_lr")}
    if name == "fedsparse":
        tuned = {**TUNED, "temperature": 1e-3, "server_gate_lr": 0.1}
    result = simulate(build(name, gates="weight", l0=1e-3, **tuned), problem, 8, evaluate_every=8)
    last = result.history[-1]
    assert 0.05 < last["sparsity"] < 1
    rows = problem.layout.split(result.model)["1.weight"]
    assert bool(((rows == 0).sum(1) % 64 != 0).any())


def test_the_closed_m_step_is_the_weighted_mean_and_keeps_what_nobody_sent() -> None:
    problem = two_neurons(3)
    algorithm = build("fedsparse-em").prepare(problem.constants())
    turn = Turn(0, 0, 3, torch.arange(3))
    server = algorithm.server_init(torch.arange(7.0), turn)
    open_gates = torch.tensor([[True, False], [True, False], [False, False]])
    rows = [torch.full((4,), 1.0), torch.full((4,), 3.0), torch.full((1,), 8.0)]
    after = algorithm.server_step(server, {"z": open_gates, "w": rows}, turn)
    of = algorithm.groups.of  # type: ignore[attr-defined]
    assert torch.equal(after["x"][of == 0], torch.full((3,), 2.0))
    assert torch.equal(after["x"][of == 2], torch.full((1,), 4.0))
    assert torch.sigmoid(after["v"]).tolist() == pytest.approx([2 / 3, 1e-3], abs=1e-6)
    assert after["alive"].tolist() == [True, False]


def test_hard_em_with_exact_clients_finds_the_support_and_its_objective_never_falls() -> None:
    """A linear regression with 5 weights, 3 clients of 30 rows: clients enumerate their gates, the
    server makes its closed M-step."""
    g = torch.Generator().manual_seed(0)
    truth = torch.tensor([1.5, -2, 0, 0, 0], dtype=torch.float64)
    xs = [torch.randn(30, 5, generator=g, dtype=torch.float64) for _ in range(3)]
    ys = [x @ truth + torch.randn(30, generator=g, dtype=torch.float64) for x in xs]
    problem = Problem(Linear(5), stack_rows(list(zip(xs, ys, strict=True))), name="sparse truth")
    algorithm = build("fedsparse-em", gates="weight", theta=0.5, prune_at_server=False)
    algorithm = algorithm.prepare(problem.constants())
    turn = Turn(0, 0, 3, torch.arange(3))
    server = algorithm.server_init(torch.zeros(5, dtype=torch.float64), turn)
    lam, l0 = 1.0, 2.0
    patterns = [torch.tensor(p, dtype=torch.float64) for p in product((0.0, 1.0), repeat=5)]

    def score(x: Tensor, y: Tensor, z: Tensor, w_s: Tensor) -> float:
        w, theta = server["x"], torch.sigmoid(server["v"])
        fit = -0.5 * float((y - x @ (z * w_s)).square().sum())
        drift = -lam / 2 * float((z * (w_s - w).square()).sum())
        prior = float((z * theta.log() + (1 - z) * (1 - theta).log()).sum())
        return fit + drift - l0 * float(z.sum()) + prior

    def expectation(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        best = (-float("inf"), patterns[0], server["x"])
        for z in patterns:
            a = x * z
            pulled = a.T @ y + lam * server["x"]
            w_s = torch.linalg.solve(a.T @ a + lam * torch.eye(5).double(), pulled)
            best = max(best, (score(x, y, z, w_s), z, w_s), key=lambda entry: entry[0])
        return best[1], best[2]

    last = -float("inf")
    for _ in range(15):
        found = [expectation(x, y) for x, y in zip(xs, ys, strict=True)]
        after_e = sum(score(x, y, *f) for x, y, f in zip(xs, ys, found, strict=True))
        assert after_e >= last - 1e-9
        gates = torch.stack([z.bool() for z, _ in found])
        sent = [w_s[z.bool()] for z, w_s in found]
        server = algorithm.server_step(server, {"z": gates, "w": sent}, turn)
        last = sum(score(x, y, *f) for x, y, f in zip(xs, ys, found, strict=True))
        assert last >= after_e - 1e-9
    assert (torch.sigmoid(server["v"]) > 0.1).tolist() == [True, True, False, False, False]


def test_the_fixed_point_of_fedprox_lies_between_mean_of_optima_and_joint_optimum() -> None:
    """Clients `a_s/2 (w - y_s)^2`, trained to the end: `sum c_s y_s / sum c_s`, c = a/(a + lam)."""
    a, y = torch.tensor([1, 3, 0.5]).double(), torch.tensor([0, 1, 4]).double()
    root = a.sqrt()
    rows = [(r.view(1, 1), (r * t).view(1)) for r, t in zip(root, y, strict=True)]
    problem = Problem(Linear(1), stack_rows(rows), name="parabolas")
    reached = []
    for lam, lr, epochs, rounds in ((1e-6, 0.2, 220, 3), (0.7, 0.2, 90, 30), (5.0, 0.1, 20, 80)):
        options = {"pull": lam, "lr": lr, "epochs": epochs, "batch": 1, "server_optimizer": "sgd"}
        result = simulate(build("fedopt", **options), problem, rounds, evaluate_every=rounds)
        c = a / (a + lam)
        reached.append(float(result.model))
        assert reached[-1] == pytest.approx(float((c * y).sum() / c.sum()), abs=1e-6)
    assert reached[:2] == pytest.approx([5 / 3, 1.36447], abs=1e-5)
    assert 10 / 9 < reached[2] < reached[1] - 0.1


def test_fedl1_sends_only_groups_above_its_threshold(digits: Problem) -> None:
    algorithm = build("fedl1", l1=0.3, batch=8, exempt=("output",), server_lr=5e-3)
    result = simulate(algorithm, digits, 15, evaluate_every=15)
    last = result.history[-1]
    assert last["sparsity"] > 0.02
    groups = result.algorithm.groups  # type: ignore[attr-defined]
    kept = groups.norm(result.model.unsqueeze(0))[0]
    assert bool(((kept == 0) | (kept > 0.3)).all())
    dense = 32 * digits.dimension * 15
    assert float(result.ledger.up_bits.double().mean()) < 0.95 * dense


def test_wrong_options_are_named(digits: Problem) -> None:
    for name, options, culprit in (
        ("fedsparse", {"temperature": 0.0}, "temperature"),
        ("fedsparse", {"gates": "block"}, "block"),
        ("fedsparse", {"theta": 1.0}, "theta"),
        ("fedsparse", {"exempt": ("1", "3")}, "every layer"),
        ("fedsparse", {"data_scale": "max"}, "max"),
        ("fedopt", {"server_optimizer": "lion"}, "lion"),
        ("fedl1", {"l1": -1.0}, "l1"),
    ):
        with pytest.raises(SympruneError, match=culprit):
            simulate(build(name, **options), digits, 1)
