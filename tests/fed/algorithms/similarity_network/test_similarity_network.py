"""Similarity network: graph, network lasso, compressor, and the training they make up."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.algorithms.similarity_network.fused_gradient import (
    code_bits,
    decode,
    encode,
    fused_lasso,
    quantise,
)
from symprune.fed.algorithms.similarity_network.graph import (
    components,
    incidence,
    nearest_neighbours,
    sketch,
    squared_distances,
)
from symprune.fed.algorithms.similarity_network.network_lasso import (
    edge_prox,
    fusion,
    network_lasso_prox,
    onto_l1_ball,
)
from symprune.fed.algorithms.similarity_network.personal_parts import Placement, make_placement
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.losses import Linear
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem, stack_rows
from symprune.fed.problems.synthetic import hidden_clusters
from symprune.fed.protocol import Turn
from symprune.fed.simulate import simulate

INF = float("inf")
DUAL = {1.0: INF, 2.0: 2.0, INF: 1.0}
PLAIN = {"denoise": 0.0, "values": 0}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_graph(n: int, seed: int = 0) -> Tensor:
    return nearest_neighbours(squared_distances(normal(n, 3, seed=seed)), 3)


def solved(target: Tensor, edges: Tensor, lam: float, eta: float, p: float) -> tuple[Tensor, ...]:
    none = torch.zeros(len(edges), target.shape[1], dtype=torch.float64)
    return network_lasso_prox(
        target, edges, none, none, lam=lam, eta=eta, p=p, steps=8_000, tolerance=1e-10
    )


def by_dual(target: Tensor, edges: Tensor, lam: float, eta: float, p: float) -> Tensor:
    """Accelerated projected gradient on the dual: multipliers inside the ball of the dual norm."""
    Q = incidence(edges, len(target))
    step = 1 / (eta * float(torch.linalg.eigvalsh(Q.T @ Q)[-1]))

    def project(v: Tensor) -> Tensor:
        if p == 1:
            return v.clamp(-lam, lam)
        if p == 2:
            return v * (lam / v.norm(dim=1, keepdim=True).clamp_min(lam))
        return onto_l1_ball(v, lam)

    u, last, momentum = torch.zeros(len(edges), target.shape[1]).double(), None, 1.0
    y = u
    for _ in range(10_000):
        u, last = project(y + step * (Q.T @ (target - eta * Q @ y))), u
        after = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        y, momentum = u + (momentum - 1) / after * (u - last), after
        if float((u - last).norm()) < 1e-12:
            break
    return target - eta * Q @ u


@pytest.mark.parametrize("p", [1.0, 2.0, INF])
@pytest.mark.parametrize("lam", [0.05, 0.3, 3.0])
def test_the_personal_step_solves_the_network_lasso(p: float, lam: float) -> None:
    target, edges, eta = normal(12, 4), random_graph(12), 0.4
    z, _, omega = solved(target, edges, lam, eta, p)
    assert float((z - by_dual(target, edges, lam, eta, p)).abs().max()) < 1e-6
    size = torch.linalg.vector_norm(omega, ord=DUAL[p], dim=1)
    assert float(size.max()) <= lam + 1e-8
    residual = (z - target) / eta - incidence(edges, 12) @ omega
    assert float(residual.abs().max()) < 1e-7


@pytest.mark.parametrize("p", [1.0, INF])
def test_the_drafts_shrinkage_is_wrong_for_other_norms_than_two(p: float) -> None:
    v, kappa = normal(50, 4), 0.7
    dual = torch.linalg.vector_norm(v, ord=DUAL[p], dim=1, keepdim=True)
    draft = v * (1 - kappa / dual).clamp_min(0)
    right = edge_prox(v, kappa, p)
    assert torch.equal(right.any(1), draft.any(1))
    assert float((right - draft).abs().max()) > 0.03

    def objective(w: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(w, ord=p, dim=1)
        return kappa * norm + 0.5 * (w - v).square().sum(1)

    assert bool((objective(right) <= objective(draft) + 1e-12).all())


def test_the_mean_of_the_personal_parts_is_kept_and_no_fusion_changes_nothing() -> None:
    target, edges = normal(12, 4), random_graph(12)
    for lam in (0.0, 0.1, 5.0):
        z, _, _ = solved(target, edges, lam, 0.4, 2.0)
        assert torch.allclose(z.mean(0), target.mean(0), atol=1e-9)
        assert lam > 0 or torch.equal(z, target)


def test_beyond_the_consensus_bound_all_clients_agree() -> None:
    chain = [(i, i + 1) for i in range(9)] + [(0, 5), (2, 7), (3, 9)]
    edges, target, eta = torch.tensor(sorted(chain)), normal(10, 3), 0.4
    flow = torch.linalg.pinv(incidence(edges, 10)) @ (target - target.mean(0)) / eta
    bound = float(flow.norm(dim=1).max())
    spread = lambda z: float((z - z.mean(0)).abs().max())  # noqa: E731
    assert spread(solved(target, edges, 1.0001 * bound, eta, 2.0)[0]) < 1e-8
    assert spread(solved(target, edges, bound / 2, eta, 2.0)[0]) > 0.01


def test_components_of_the_graph_do_not_touch_each_other() -> None:
    edges = torch.tensor([(0, 1), (1, 2), (3, 4)])
    target = normal(5, 2)
    z, split, _ = solved(target, edges, 100.0, 0.4, 2.0)
    assert torch.allclose(z[:3], target[:3].mean(0).expand(3, -1), atol=1e-8)
    assert torch.allclose(z[3:], target[3:].mean(0).expand(2, -1), atol=1e-8)
    assert not bool(split.any())
    assert components(edges, 5).tolist() == [0, 0, 0, 3, 3]


def test_the_graph_is_simple_and_follows_a_permutation_of_the_clients() -> None:
    points, k = normal(20, 3), 4
    edges = nearest_neighbours(squared_distances(points), k)
    assert bool((edges[:, 0] < edges[:, 1]).all()) and len(edges.unique(dim=0)) == len(edges)
    Q = incidence(edges, 20)
    laplacian, degree = Q @ Q.T, torch.bincount(edges.reshape(-1), minlength=20)
    assert int(degree.min()) >= k
    adjacency = torch.zeros(20, 20).double()
    adjacency[edges[:, 0], edges[:, 1]] = adjacency[edges[:, 1], edges[:, 0]] = 1
    assert torch.equal(laplacian, torch.diag(degree.double()) - adjacency)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    other = order[nearest_neighbours(squared_distances(points[order]), k)]
    assert {tuple(sorted(e)) for e in other.tolist()} == {tuple(e) for e in edges.tolist()}
    with pytest.raises(SympruneError, match="20 nearest"):
        nearest_neighbours(squared_distances(points), 20)


@pytest.mark.parametrize(("space", "least"), [("data", 0.8), ("model", 0.6), ("feature", 0.25)])
def test_neighbours_are_from_the_same_hidden_cluster_more_often_than_chance(
    space: str, least: float
) -> None:
    """Chance is 0.22; data space is by far the best on unbalanced labels."""
    turn = Turn(0, 0, 24, torch.arange(24))
    edges = nearest_neighbours(squared_distances(sketch(hidden_clusters(0), space, turn)), 4)
    assert float((edges[:, 0] % 4 == edges[:, 1] % 4).double().mean()) > least


def test_the_sketch_of_data_space_estimates_the_kernels_distance() -> None:
    problem = make_problem("digits", split="class:2", clients=4, dtype="float64")
    turn = Turn(0, 0, 4, torch.arange(4))
    got = squared_distances(sketch(problem, "data", turn))
    x, y = problem.rows.x, problem.rows.y
    width, exact = x.shape[2], torch.zeros(4, 4).double()
    means = {}
    for i in range(4):
        for j in range(4):
            gap = (x[i].unsqueeze(1) - x[j].unsqueeze(0)).square().sum(2)
            kernel = torch.exp(-gap / (2 * width)) * (y[i].unsqueeze(1) == y[j].unsqueeze(0))
            means[i, j] = problem.rows.weights[i] @ kernel @ problem.rows.weights[j]
    for i in range(4):
        for j in range(4):
            exact[i, j] = means[i, i] + means[j, j] - 2 * means[i, j]
    assert torch.allclose(got, exact, atol=0.12)
    assert float(torch.corrcoef(torch.stack([got.reshape(-1), exact.reshape(-1)]))[0, 1]) > 0.98


def test_index_maps_are_the_matrices_of_the_formula_also_when_tied() -> None:
    place = Placement(torch.tensor([0, 0, 1, -1, -1]), torch.tensor([-1, 0, 1, 1, -1]))
    A, B = torch.zeros(5, 2).double(), torch.zeros(5, 2).double()
    A[0, 0] = A[1, 0] = A[2, 1] = 1
    B[1, 0] = B[2, 1] = B[3, 1] = 1
    x, z, g = normal(3, 2, seed=1), normal(3, 2, seed=2), normal(3, 5, seed=3)
    assert place.additive
    assert torch.allclose(place.model(x, z), x @ A.T + z @ B.T)
    assert torch.allclose(place.shared_gradient(g), g @ A)
    assert torch.allclose(place.personal_gradient(g), g @ B)


def test_placements_by_name() -> None:
    softmax = make_placement(FlatLayout(("weight",), ((3, 4),)), "bias")
    assert softmax.personal.tolist() == [-1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 2]
    names = ("1.weight", "1.bias", "3.weight", "3.bias")
    mlp = FlatLayout(names, ((2, 2), (2,), (2, 2), (2,)))
    assert make_placement(mlp, "bias").personal_size == 2
    assert make_placement(mlp, "output").personal_size == 6
    assert make_placement(mlp, "all").additive
    assert make_placement(mlp, "only").shared_size == 0
    assert make_placement(mlp, "none").personal_size == 0
    assert make_placement(mlp, "3:5").personal_size == 2
    with pytest.raises(SympruneError, match="head"):
        make_placement(mlp, "head")
    with pytest.raises(SympruneError, match="no biases"):
        make_placement(FlatLayout(("weight",), ((4,),)), "bias")


def total(u: np.ndarray, g: np.ndarray, gamma: float) -> float:
    jumps = np.abs(np.diff(u)).sum() + abs(u[-1])
    return float(0.5 * ((u - g) ** 2).sum() + gamma * jumps)


@pytest.mark.parametrize("d", [1, 2, 7, 55, 300])
@pytest.mark.parametrize("gamma", [0.01, 0.3, 2.0])
def test_the_fused_lasso_is_exact(d: int, gamma: float) -> None:
    """Against its dual: `u = g - D^T xi` with `|xi| <= gamma`; equal values prove optimality."""
    g = normal(d, seed=d).numpy()
    u = fused_lasso(g, gamma)
    xi = np.cumsum(g - u)  # D^T xi = g - u
    assert np.abs(xi).max() <= gamma + 1e-9
    dual = float(0.5 * (g**2).sum() - 0.5 * (u**2).sum())
    assert total(u, g, gamma) <= dual + 1e-9


def test_facts_about_the_fused_lasso() -> None:
    g = normal(55).numpy()
    for gamma in (0.05, 0.5):
        u = fused_lasso(g, gamma)
        assert np.abs(u - g).max() <= 2 * gamma + 1e-12
        assert np.allclose(fused_lasso(-g, gamma), -u, atol=1e-12)
        assert len(np.unique(u)) < 55
    enough = np.abs(np.cumsum(g)).max()
    assert np.abs(fused_lasso(g, 1.0001 * enough)).max() < 1e-12
    assert np.abs(fused_lasso(g, 0.9 * enough)).max() > 1e-3
    assert np.array_equal(fused_lasso(g, 0.0), g)
    bidiagonal = np.eye(55) - np.eye(55, k=1)
    smallest = np.linalg.svd(bidiagonal)[1].min()
    assert smallest == pytest.approx(2 * math.sin(math.pi / (2 * 111)), rel=1e-9)


def test_the_code_reproduces_the_gradient_bit_for_bit() -> None:
    g = normal(55).numpy().astype(np.float32)
    half = np.repeat(np.float32([1.5, -2.0]), [27, 28])
    samples = [g, quantise(g, 4), fused_lasso(g, 0.5), np.full(55, 0.3), half, np.zeros(1)]
    for u in samples:
        u = np.asarray(u, np.float32)
        code = encode(u)
        assert np.array_equal(decode(code, len(u)).view(np.uint32), u.view(np.uint32))
        assert len(code) == code_bits(u) <= 32 * len(u) + 2
    assert code_bits(np.full(55, 0.3)) == 35
    assert code_bits(half) == 87


def test_kmeans_leaves_few_values_near_the_old_ones() -> None:
    g = normal(200).numpy()
    coarse, fine = quantise(g, 4), quantise(g, 16)
    assert len(np.unique(coarse)) == 4 and len(np.unique(fine)) == 16
    assert np.abs(fine - g).mean() < np.abs(coarse - g).mean() < 0.5
    assert np.array_equal(quantise(np.float64([1, 2, 1, 2]), 4), [1, 2, 1, 2])


def regression(seed: int = 0) -> Problem:
    """30 clients in 3 clusters: 10 shared and 10 cluster-specific coefficients, 12 rows each."""
    shared, own = normal(10, seed=seed), normal(3, 10, seed=seed + 100)
    parts = []
    for n in range(30):
        x = normal(12, 20, seed=seed + 200 + n)
        y = x @ torch.cat([shared, own[n % 3]]) + 0.5 * normal(12, seed=seed + 300 + n)
        parts.append((x, y))
    return Problem(Linear(20), stack_rows(parts), name="clustered regression")


def test_the_objective_falls_monotonically_to_its_optimum() -> None:
    problem = regression()
    algorithm = build(
        "similarity-network", personal="10:20", lam=3e-3, space="model", admm_steps=300, **PLAIN
    )
    history = simulate(algorithm, problem, 200).history[1:]
    objective = [r["personal_loss"] + r["fusion"] for r in history]
    rises = max(b - a for a, b in pairwise(objective))
    assert rises <= 1e-10
    long = simulate(algorithm, problem, 800, evaluate_every=400).history[1:]
    later, best = (r["personal_loss"] + r["fusion"] for r in long)
    gap = [objective[t] - best for t in (10, 50, 199)]
    assert gap[0] > 10 * gap[1] > 100 * gap[2] >= 0 and gap[2] < 1e-3
    assert 0 <= later - best < 1e-5


def test_a_strong_fusion_gives_the_pooled_solution() -> None:
    problem = regression()
    algorithm = build("similarity-network", personal="only", lam=10.0, space="model", **PLAIN)
    result = simulate(algorithm, problem, 300, evaluate_every=300)
    models = result.algorithm.personal_models(result.server, result.client, problem)
    x, y = problem.rows.x.reshape(-1, 20), problem.rows.y.reshape(-1)
    assert models is not None
    assert torch.allclose(models, torch.linalg.lstsq(x, y).solution.expand(30, -1), atol=1e-8)
    assert result.history[-1]["clusters"] == 1


def test_the_limits_are_distributed_descent_and_clients_alone() -> None:
    problem = regression()
    shared = build("similarity-network", personal="none", eta=0.1, edges=(), **PLAIN)
    descent = simulate(build("gd", gamma=0.1), problem, 10)
    assert torch.allclose(simulate(shared, problem, 10).model, descent.model, atol=1e-12)
    alone = build("similarity-network", personal="only", lam=0.0, eta=0.1, edges=(), **PLAIN)
    result = simulate(alone, problem, 10)
    w = torch.zeros(30, 20, dtype=torch.float64)
    for _ in range(10):
        w = w - 0.1 * problem.gradient(w)
    assert torch.allclose(result.server["z"], w, atol=1e-12)


def test_a_round_is_a_gradient_step_on_shared_and_personal_parts_that_add_up() -> None:
    """`(1/N) sum f_n(x + z_n)`: every weight is in both parts, the gradient comes from autograd."""
    problem, eta, eta_own = regression(), 0.05, 0.7
    steps = {"eta": eta, "eta_personal": eta_own}
    algorithm = build("similarity-network", personal="all", lam=0.0, edges=(), **steps, **PLAIN)
    start = simulate(algorithm, problem, 2).server
    x, z = start["x"].clone().requires_grad_(), start["z"].clone().requires_grad_()
    residual = (problem.rows.x @ (x + z).unsqueeze(-1)).squeeze(-1) - problem.rows.y
    loss = (problem.rows.weights * residual.square()).sum() / 2 / 30
    for_x, for_z = torch.autograd.grad(loss, (x, z))
    after = simulate(algorithm, problem, 3).server
    assert torch.allclose(after["x"], start["x"] - eta * for_x, atol=1e-12)
    assert torch.allclose(after["z"], start["z"] - eta_own * for_z, atol=1e-12)


def test_error_feedback_removes_the_floor_of_the_compressor() -> None:
    problem = regression()
    options = {"personal": "10:20", "lam": 3e-3, "space": "model"}

    def run(**compressor: object) -> dict[str, float]:
        algorithm = build("similarity-network", **options, **compressor)
        return simulate(algorithm, problem, 100, evaluate_every=100).history[-1]

    value = lambda r: r["personal_loss"] + r["fusion"]  # noqa: E731
    plain = run(**PLAIN)
    with_feedback, without = run(denoise=0.0), run(denoise=0.0, error_feedback=False)
    assert value(with_feedback) - value(plain) < 1e-3
    assert value(without) - value(plain) > 3 * abs(value(with_feedback) - value(plain))
    assert with_feedback["paper_bits_up"] < 0.35 * plain["paper_bits_up"]


def test_fusion_helps_clients_with_unbalanced_labels() -> None:
    problem, accuracy = hidden_clusters(0), {}
    for label, options in (
        ("alone", {"lam": 0.0}),
        ("fused", {"lam": 3e-3}),
        ("global", {"personal": "none"}),
    ):
        algorithm = build("similarity-network", eta=1.0, **options, **PLAIN)
        result = simulate(algorithm, problem, 80, evaluate_every=80)
        accuracy[label] = result.history[-1]["personal_accuracy"]
        if label == "fused":
            assert result.history[-1]["clusters"] <= 8
    assert accuracy["fused"] > accuracy["alone"] + 0.02
    assert accuracy["fused"] > accuracy["global"] + 0.05


def test_wrong_options_are_named() -> None:
    problem = regression()
    for options, culprit in (
        ({"p": 3.0}, "p = 3.0"),
        ({"space": "mood"}, "mood"),
        ({"lam": -1.0}, "lam"),
        ({"edges": ((0, 40),)}, "40"),
        ({"personal": "bias"}, "biases"),
    ):
        with pytest.raises(SympruneError, match=culprit):
            simulate(build("similarity-network", **{"personal": "all", **options}), problem, 1)


def test_the_penalty_is_the_sum_over_edges() -> None:
    z, edges = torch.tensor([[0.0, 0], [3, 4], [3, 4]]), torch.tensor([(0, 1), (1, 2)])
    assert [float(fusion(z, edges, p)) for p in (1.0, 2.0, INF)] == [7, 5, 4]
