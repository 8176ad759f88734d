"""FedSpa: masks of constant density, masked training and averaging, and what it shares with
FedAvg."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.algorithms.fedspa.fedspa import FedSpa
from symprune.fed.algorithms.shared.layer_masks import (
    densities,
    erk_densities,
    layer_ones,
    prune_and_regrow,
)
from symprune.fed.problems.flops import layer_macs, training_flops
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.losses import Module
from symprune.fed.problems.networks import network
from symprune.fed.problems.problem import Problem
from symprune.fed.problems.synthetic import gaussian_classes
from symprune.fed.protocol import State, Turn
from symprune.fed.simulate import Result, simulate

TRAINING = {"batch": 16, "lr": 0.05, "epochs": 2}


@pytest.fixture(scope="module")
def problem() -> Problem:
    return gaussian_classes(
        0.3, clients=6, classes=5, dimension=8, rows=24, test_rows=10, widths=(16, 12)
    )


def run(problem: Problem, rounds: int = 5, name: str = "fedspa", **options: object) -> Result:
    return simulate(build(name, **{**TRAINING, **options}), problem, rounds)


def ones(mask: Tensor, layout: FlatLayout) -> list[list[int]]:
    return [part.flatten(1).sum(1).tolist() for part in layout.split(mask).values()]


class Recorded(FedSpa):
    """FedSpa that writes down what the server saw in every round."""

    seen: list[tuple[State, dict, State, Tensor]]

    def server_step(self, server, replies, turn):  # type: ignore[no-untyped-def]
        after = super().server_step(server, replies, turn)
        self.seen.append((server, replies, after, turn.clients))
        return after


def recorded(problem: Problem, rounds: int, **options: object) -> list:
    Recorded.seen = []
    simulate(Recorded(**{**TRAINING, **options}), problem, rounds)
    return Recorded.seen


@pytest.mark.parametrize("search", ["dst", "rsm", "score"])
def test_at_density_one_it_is_fedavg_to_the_bit(problem: Problem, search: str) -> None:
    sparse = run(problem, density=1.0, search=search, cohort_size=3)
    dense = run(problem, name="fedavg-epochs", cohort_size=3)
    assert torch.equal(sparse.model, dense.model)


def test_without_pruning_the_dynamic_masks_are_the_static_ones(problem: Problem) -> None:
    dynamic, static = run(problem, prune_rate=0.0), run(problem, search="rsm")
    assert torch.equal(dynamic.model, static.model)
    assert torch.equal(dynamic.client["mask"], static.client["mask"])


@pytest.mark.parametrize("options", [{}, {"grow": "random"}, {"mask_score": "ria"},
                                     {"search": "score", "mask_score": "wanda"},
                                     {"exclude_pruned": True}])  # fmt: skip
def test_every_mask_keeps_its_count_in_every_layer_and_both_sides_know_it(
    problem: Problem, options: dict
) -> None:
    expected = [[c] * 6 for c in layer_ones(problem.layout, 0.5, "erk")]
    for rounds in range(4):
        result = run(problem, rounds, anneal_rounds=10, cohort_size=4, **options)
        assert ones(result.client["mask"], problem.layout) == expected
        assert torch.equal(result.client["mask"], result.server["masks"])
    start = run(problem, 0, **options).client["mask"]
    assert not torch.equal(result.client["mask"], start)


def test_local_weights_stay_zero_outside_the_mask_under_weight_decay(problem: Problem) -> None:
    heavy = replace(problem, l2=0.1)
    algorithm = build("fedspa", **TRAINING).prepare(heavy.constants())
    turn = Turn(0, 0, 6, torch.arange(6))
    client = algorithm.client_init(heavy, turn)
    server = algorithm.server_init(heavy.initial(0), turn)
    received = {"values": algorithm.broadcast(server, turn)["values"].tensor}  # type: ignore[union-attr]
    points: list[Tensor] = []
    gradient = type(heavy).gradient

    def watched(self, w, batch=None):  # type: ignore[no-untyped-def]
        points.append(w)
        return gradient(self, w, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Problem, "gradient", watched)
        algorithm.client_step(client, received, heavy, turn)
    assert len(points) > 4
    assert all(bool((w[~client["mask"]] == 0).all()) for w in points)
    assert bool((points[-1] != points[0]).any())


def test_a_weight_moves_by_the_sum_of_its_updates_over_the_number_of_clients(
    problem: Problem,
) -> None:
    for before, replies, after, clients in recorded(
        problem, 3, search="rsm", different_masks=True, density=0.2, cohort_size=3
    ):
        masks = before["masks"][clients]
        update = torch.zeros(masks.shape)
        update[masks] = replies["update"].flatten()
        covered = masks.sum(0)
        assert torch.equal(after["x"][covered == 0], before["x"][covered == 0])
        alone = covered == 1
        assert int(alone.sum()) > 20
        expected = before["x"][alone] - update.sum(0)[alone] / 3
        assert torch.equal(after["x"][alone], expected)


def test_clients_that_were_not_sampled_keep_their_mask_and_regrown_weights_come_from_the_server(
    problem: Problem,
) -> None:
    algorithm = build("fedspa", **TRAINING).prepare(problem.constants())
    for before, _, after, clients in recorded(problem, 3, cohort_size=2, anneal_rounds=10):
        others = torch.tensor([c for c in range(6) if c not in clients.tolist()])
        assert torch.equal(before["masks"][others], after["masks"][others])
        grown = after["masks"][clients] & ~before["masks"][clients]
        assert bool(grown.any(1).all())
        message = algorithm.broadcast(after, Turn(9, 0, 6, clients))["values"]
        sent = torch.zeros(grown.shape)
        sent[after["masks"][clients]] = message.tensor.flatten()  # type: ignore[union-attr]
        assert torch.equal(sent[grown], after["x"].expand(len(clients), -1)[grown])
        assert bool((sent[grown] != 0).all())


def test_the_prune_rate_falls_like_a_cosine_to_zero() -> None:
    algorithm = FedSpa(prune_rate=0.4, anneal_rounds=11)
    rates = [algorithm.annealed_rate(Turn(t, 0, 1, torch.arange(1))) for t in (0, 5, 10, 15)]
    assert rates == pytest.approx([0.4, 0.2, 0.0, 0.0], abs=1e-15)
    assert rates[2] == rates[3] == 0


def test_masks_of_the_last_round_do_not_change(problem: Problem) -> None:
    seen = recorded(problem, 4, anneal_rounds=4)
    assert not torch.equal(seen[2][0]["masks"], seen[2][2]["masks"])
    assert torch.equal(seen[3][0]["masks"], seen[3][2]["masks"])


@pytest.mark.parametrize(
    ("gradient", "exclude", "expected"),
    [
        ([0, 0, 0.2, 3, -4, 1], False, [1, 1, 0, 0, 1, 0]),
        ([0, 0, 9, 3, -4, 1], False, [1, 1, 1, 0, 0, 0]),
        ([0, 0, 9, 3, -4, 1], True, [1, 1, 0, 0, 1, 0]),
    ],
)
def test_the_smallest_weight_goes_and_the_largest_gradient_comes(
    gradient: list[float], exclude: bool, expected: list[int]
) -> None:
    w = torch.tensor([[5, -1, 0.1, 0, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 0, 0, 0]]).bool()
    after = prune_and_regrow(
        mask, w.abs(), torch.tensor([gradient], dtype=torch.float32).abs(), 1, exclude
    )
    assert after.int().tolist() == [expected]


def test_one_full_step_is_gradient_descent_on_the_masked_objective(problem: Problem) -> None:
    one = replace(problem, l2=0.0)
    options = {"search": "rsm", "different_masks": True, "epochs": 1, "batch": 24, "lr": 0.3}
    result = simulate(build("fedspa", **options), one, 1)
    w = one.initial(0).requires_grad_()
    loss = one.loss
    total = torch.zeros(())
    for k, mask in enumerate(result.server["masks"]):
        output = torch.func.functional_call(loss.module, loss.layout.split(mask * w), one.rows.x[k])  # type: ignore[attr-defined]
        total = total + torch.nn.functional.cross_entropy(output, one.rows.y[k].long()) / 6
    (gradient,) = torch.autograd.grad(total, w)
    assert torch.allclose(result.model, (w - 0.3 * gradient).detach(), atol=1e-6)


# The densities FedSpa's FLOPs follow from, and the share of the dense FLOPs, without and with the
# batch of the mask search (500 rows a client for CIFAR, 1248 for EMNIST-L, five epochs).
ERK = {
    "lenet5": ((784,), 26, 1248, [1, 0.477, 0.485, 1], 0.5468, 0.5673),
    "vgg11": (
        (3, 32, 32), 10, 500,
        [1, 1, 1, 0.849, 0.634, 0.422, 0.422, 0.422, 1], 0.7033, 0.7545,
    ),
    "resnet18": ((3, 32, 32), 100, 500, None, 0.7952, 0.8464),
}  # fmt: skip


@pytest.mark.parametrize("name", ERK)
def test_erk_densities_and_flops_are_the_papers(name: str) -> None:
    shape, classes, rows, expected, alone, with_search = ERK[name]
    module = network(name)(shape, classes)
    layout = Module(lambda: module).layout
    each = dict(zip(layout.names, densities(layout, 0.5, "erk"), strict=True))
    weights = [n for n, s in zip(layout.names, layout.shapes, strict=True) if len(s) > 1]
    if expected is not None:
        assert [each[n] for n in weights] == pytest.approx(expected, abs=6e-4)
    else:
        found = sorted({round(each[n], 3) for n in weights})
        assert found == pytest.approx([0.356, 0.535, 0.717, 1.0], abs=6e-4)
    sizes = dict(zip(layout.names, layout.sizes, strict=True))
    budget = sum(each[n] * sizes[n] for n in weights) - 0.5 * sum(sizes[n] for n in weights)
    assert abs(budget) < 1
    macs = layer_macs(module, shape)
    dense = training_flops(macs, {}, rows, 5)
    assert training_flops(macs, each, rows, 5) / dense == pytest.approx(alone, abs=6e-4)
    searched = training_flops(macs, each, rows, 5, 128) / dense
    assert searched == pytest.approx(with_search, abs=6e-4)


def test_erk_gives_more_to_layers_with_fewer_weights_per_channel() -> None:
    shapes = [(20, 1, 5, 5), (50, 20, 5, 5), (500, 800), (26, 500)]
    each = erk_densities(shapes, 0.1)
    ratio = [sum(s) / math.prod(s) for s in shapes]
    order = sorted(range(4), key=lambda i: ratio[i])
    assert [each[i] for i in order] == sorted(each)
    assert max(each) <= 1


def test_paper_bits_are_the_density_times_fedavgs(problem: Problem) -> None:
    kept = sum(layer_ones(problem.layout, 0.5, "erk")) / problem.dimension
    bits = {}
    for name, options in (
        ("fedavg-epochs", {}),
        ("fedspa", {}),
        ("subsampling", {}),
        ("local", {}),
    ):
        last = run(problem, 3, name=name, **options).history[-1]
        bits[name] = last["paper_bits_up"] + last["paper_bits_down"]
    assert bits["fedspa"] == pytest.approx(kept * bits["fedavg-epochs"], rel=1e-12)
    half = round(0.5 * problem.dimension) / problem.dimension
    assert bits["subsampling"] == pytest.approx((1 + half) / 2 * bits["fedavg-epochs"], rel=1e-12)
    assert bits["local"] == 0


def test_the_bytes_contain_the_masks_the_paper_does_not_count(problem: Problem) -> None:
    dynamic, static = run(problem, 3), run(problem, 3, search="rsm")
    extra = dynamic.history[-1]["bytes_up"] - static.history[-1]["bytes_up"]
    assert 0 < extra < 3 * 6 * (problem.dimension / 8 + 20)
    assert dynamic.history[-1]["paper_bits_up"] == static.history[-1]["paper_bits_up"]


@pytest.mark.parametrize(
    ("name", "shape", "classes", "rounds", "gigabytes"),
    [
        ("resnet18", (3, 32, 32), 100, 1000, 897.6),
        ("vgg11", (3, 32, 32), 10, 1000, 738.5),
        ("lenet5", (784,), 26, 400, 14.05),
    ],
)
def test_fedavg_costs_the_gigabytes_of_the_paper(
    name: str, shape: tuple[int, ...], classes: int, rounds: int, gigabytes: float
) -> None:
    size = Module(lambda: network(name)(shape, classes)).layout.dimension
    assert size * 4 * 2 * 10 * rounds / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_sub_fedavg_prunes_towards_its_target_and_never_beyond(problem: Problem) -> None:
    options = {"min_accuracy": 0.3, "prune_step": 0.2, "lr": 0.2, "epochs": 3}
    result = run(problem, 20, name="sub-fedavg", **options)
    density = result.series("density")
    assert density[0] == 1 and all(a >= b for a, b in pairwise(density))
    assert density[-1] < 0.8
    target = layer_ones(problem.layout, 0.5, "uniform")
    for counts, least in zip(ones(result.client["mask"], problem.layout), target, strict=True):
        assert min(counts) >= least
    assert torch.equal(result.client["mask"], result.server["masks"])


def test_sub_fedavg_averages_a_weight_over_those_who_kept_it() -> None:
    algorithm = build("sub-fedavg")
    masks = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    server = {"x": torch.tensor([9.0, 9.0, 9.0]), "masks": masks}
    pruned = torch.tensor([[0, 1, 0], [0, 1, 0]]).bool()
    replies = {"values": [torch.tensor([1.0, 4.0]), torch.tensor([3.0])], "pruned": pruned}
    after = algorithm.server_step(server, replies, Turn(0, 0, 2, torch.arange(2)))
    assert after["x"].tolist() == [2.0, 9.0, 4.0]
    assert after["masks"].int().tolist() == [[1, 0, 1], [1, 0, 0]]


def test_ditto_without_pull_is_local_training_beside_fedavg(problem: Problem) -> None:
    result = run(problem, name="ditto", lam=0.0, personal_epochs=2)
    assert torch.equal(result.model, run(problem, name="fedavg-epochs").model)
    strong = run(problem, name="ditto", lam=5.0, personal_epochs=2)
    distance = [float((r.client["v"] - r.model).norm()) for r in (result, strong)]
    assert distance[1] < distance[0] / 2


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"density": 0.0}, "Density"),
        ({"allocation": "owl"}, "owl"),
        ({"search": "magic"}, "magic"),
        ({"grow": "grass"}, "grass"),
        ({"mask_score": "wandaa"}, "wanda"),
        ({"prune_rate": 1.5}, "prune_rate"),
        ({"lr": -1.0}, "lr"),
    ],
)
def test_a_wrong_option_is_named(problem: Problem, options: dict, word: str) -> None:
    with pytest.raises(SympruneError, match=word):
        simulate(build("fedspa", **options), problem, 1)


@pytest.mark.slow
def test_masks_personalise_under_label_skew_and_cost_accuracy_without_it() -> None:
    """The paper's ordering on Gaussian classes, mean of two seeds, fifty rounds."""

    def accuracy(name: str, skew: float | None, **options: object) -> float:
        total = 0.0
        for seed in (0, 1):
            problem = gaussian_classes(skew, seed=seed)
            chosen = {"batch": 16, "lr": 0.05, "cohort_size": 5, **options}
            result = simulate(build(name, **chosen), problem, 50, seed=seed, evaluate_every=50)
            personal = result.algorithm.personal_models(result.server, result.client, problem)
            w = result.model.expand(problem.clients, -1) if personal is None else personal
            total += problem.evaluate_personal(w)["personal_accuracy"] / 2
        return total

    dynamic = {"anneal_rounds": 50}
    assert accuracy("fedspa", 0.2, **dynamic) >= accuracy("fedavg-epochs", 0.2) + 0.04
    fedavg, static = accuracy("fedavg-epochs", None), accuracy("fedspa", None, search="rsm")
    sparse = accuracy("fedspa", None, **dynamic)
    assert fedavg >= static - 0.015 and static >= sparse - 0.015
    assert sparse > accuracy("local", None)
    apart = accuracy("fedspa", None, search="rsm", different_masks=True)
    assert apart < static - 0.15
