"""FedP3: clients send their own layers and nothing else, pruned copies never reach the average."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.algorithms import build
from symprune.fed.algorithms.fedp3.fedp3 import FedP3
from symprune.fed.algorithms.fedp3.layer_subsets import (
    aggregation_weights,
    assign,
    by_weight,
    layer_numbers,
    layer_sizes,
    layer_weights,
    leading_block,
    prune_mask,
    traffic,
)
from symprune.fed.problems.datasets import Dataset, load
from symprune.fed.problems.losses import Module
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.networks import network
from symprune.fed.problems.partitions import partition
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Turn
from symprune.fed.randomness import Stream
from symprune.fed.simulate import simulate
from symprune.fed.wire.parcel import Parcel
from symprune.fed.wire.payload import decode_message

N = 6
TRAINING = {"steps": 3, "batch": 16}


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(
        "digits", "mlp:16-14-12", "class-set:5", clients=N, l2=0.0, client_test_share=0.3
    )


def everyone(number: int = 0) -> Turn:
    return Turn(number, 0, N, torch.arange(N))


def prepared(problem: Problem, **options: object) -> FedP3:
    algorithm = build("fedp3", **{**TRAINING, **options}).prepare(problem.constants())
    assert isinstance(algorithm, FedP3)
    return algorithm


def stream(purpose: str = "test", clients: int = N) -> Stream:
    return Stream.of(0, 0, purpose, torch.arange(clients))


def first_reply(algorithm: FedP3, problem: Problem) -> tuple[dict[str, Tensor], Parcel]:
    """The server's state and the clients' encoded replies of the first round."""
    server = algorithm.server_init(problem.initial(0), everyone())
    down = Parcel(algorithm.broadcast(server, everyone()), N, reply=False)
    client = algorithm.client_init(problem, everyone())
    _, message = algorithm.client_step(client, down.received(), problem, everyone())
    return server, Parcel(message, N, reply=True)


def test_with_all_layers_and_no_pruning_it_is_local_sgd(problem: Problem) -> None:
    algorithm = build("fedp3", **TRAINING, layers="full", keep=1.0)
    result = simulate(algorithm, problem, 3)
    x = problem.initial(0)
    for number in range(3):
        w, batches = x.expand(N, -1), everyone(number).stream("batch")
        for _ in range(3):
            w = w - 0.1 * problem.gradient(w, problem.batch(batches, 16))
        x = w.mean(0)
    assert torch.allclose(result.model, x, atol=1e-6)


@pytest.mark.parametrize("rule", ["opu3", "opu2", "lowerb", "opu1-2-3", "opu2-3", "drop:0-1,2-2"])
def test_a_reply_is_exactly_the_clients_own_layers(problem: Problem, rule: str) -> None:
    algorithm = prepared(problem, layers=rule, lr=0.0)
    server, parcel = first_reply(algorithm, problem)
    layout = problem.layout
    assert bool(server["owned"][:, -1].all())
    for row in range(N):
        fields = decode_message(parcel.encode(row))
        mine = by_weight(server["owned"][row : row + 1], layout)[0]
        assert list(fields) == ["layers"]
        assert torch.equal(fields["layers"], server["x"][mine])


def test_nothing_of_another_layer_hides_in_the_reply(problem: Problem) -> None:
    algorithm = prepared(problem, layers="lowerb")
    server, parcel = first_reply(algorithm, problem)
    sizes = torch.tensor(layer_sizes(problem.layout))
    for row in range(N):
        values = decode_message(parcel.encode(row))["layers"]
        assert values.numel() == int((sizes * server["owned"][row]).sum())


def test_a_layer_nobody_trains_stays_bit_for_bit(problem: Problem) -> None:
    result = simulate(build("fedp3", **TRAINING, layers="drop:1-2"), problem, 3)
    start, parts = problem.layout.split(problem.initial(0)), problem.layout.split(result.model)
    changed = [not torch.equal(start[name], parts[name]) for name in start]
    assert changed == [True, True, False, False, False, False, True, True]


@pytest.mark.parametrize("aggregation", ["simple", "weighted", "attention"])
@pytest.mark.parametrize("prune", ["random", "magnitude", "ordered"])
def test_pruned_copies_never_reach_the_average(
    problem: Problem, aggregation: str, prune: str
) -> None:
    options = {"lr": 0.0, "keep": 0.5, "layers": "opu1-2-3"}
    algorithm = build("fedp3", **TRAINING, **options, aggregation=aggregation, prune=prune)
    result = simulate(algorithm, problem, 10)
    assert torch.allclose(result.model, problem.initial(0), atol=1e-5)


@pytest.mark.parametrize("prune", ["random", "magnitude", "ordered"])
def test_removed_weights_are_zero_during_local_training_and_kept_ones_are_not_rescaled(
    problem: Problem, prune: str
) -> None:
    algorithm = prepared(problem, layers="lowerb", keep=0.6, prune=prune)
    server = algorithm.server_init(problem.initial(0), everyone())
    mask = algorithm.mask(server["owned"], everyone(), server["x"])
    points: list[Tensor] = []

    class Watched(Problem):
        def gradient(self, w: Tensor, batch=None) -> Tensor:  # type: ignore[no-untyped-def, override]
            points.append(w)
            return super().gradient(w, batch)

    watched = Watched(**{f: getattr(problem, f) for f in ("loss", "rows", "l2")})
    first_reply(algorithm, watched)
    assert len(points) == 3 and torch.equal(points[0], mask * server["x"])
    assert all(bool((w[~mask] == 0).all()) for w in points)
    assert not torch.equal(points[0][mask], points[-1][mask])


def test_the_kept_share_is_exact_in_every_pruned_weight(problem: Problem) -> None:
    shapes = problem.layout.shapes
    owned = assign("lowerb", 4, stream())
    mask = prune_mask("random", 0.9, problem.layout, owned, stream())
    numbers = layer_numbers(shapes)
    for i, part in enumerate(problem.layout.split(mask).values()):
        size = math.prod(shapes[i])
        for row, own in zip(part.flatten(1), owned[:, numbers[i]], strict=True):
            whole = bool(own) or len(shapes[i]) == 1
            assert int(row.sum()) == (size if whole else round(0.9 * size))


@pytest.mark.parametrize("kind", ["uniform", "ordered"])
def test_local_pruning_that_keeps_everything_is_fixed_pruning(problem: Problem, kind: str) -> None:
    options = {**TRAINING, "layers": "lowerb"}
    fixed = simulate(build("fedp3", **options), problem, 3)
    same = simulate(build("fedp3", **options, local_prune=kind, q_min=1.0), problem, 3)
    less = simulate(build("fedp3", **options, local_prune=kind, q_min=0.3), problem, 3)
    assert torch.equal(fixed.model, same.model)
    assert not torch.equal(fixed.model, less.model)


def test_frozen_unassigned_layers_change_the_course_but_not_the_layers_sent(
    problem: Problem,
) -> None:
    options = {**TRAINING, "layers": "lowerb", "lr": 0.5}
    trained = simulate(build("fedp3", **options), problem, 2)
    frozen = simulate(build("fedp3", **options, train_unassigned=False), problem, 2)
    assert not torch.equal(trained.model, frozen.model)
    assert torch.equal(trained.ledger.up_bits, frozen.ledger.up_bits)


def test_ordered_dropout_keeps_a_leading_block() -> None:
    block = leading_block((4, 3, 1, 2), torch.tensor([[0.5], [1.0]]), cut_inputs=True)
    first = block[0].view(4, 3, 2)
    assert bool(first[:2, :2].all()) and int(first.sum()) == 8
    assert bool(block[1].all())
    assert int(leading_block((4, 3), torch.tensor([[0.5]]), cut_inputs=False).sum()) == 6


def test_the_masks_of_a_fixed_mechanism_do_not_change(problem: Problem) -> None:
    owned = assign("lowerb", 4, stream())
    for fixed in (True, False):
        algorithm = prepared(problem, fixed_mask=fixed, keep=0.5)
        same = torch.equal(algorithm.mask(owned, everyone(1)), algorithm.mask(owned, everyone(5)))
        assert same == fixed


def test_layer_weights_add_up_to_one_and_attention_contains_the_others() -> None:
    owned = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 1], [0, 1, 0, 1]]).bool()
    simple = layer_weights(torch.zeros(3, 4), owned)
    assert torch.allclose(simple.sum(0), torch.tensor([1.0, 1, 0, 1]))
    assert simple[:, 0].tolist() == [0.5, 0.5, 0.0]
    weighted = layer_weights(owned.sum(1, keepdim=True).log().expand(-1, 4), owned)
    assert torch.allclose(weighted[:, 0], torch.tensor([0.4, 0.6, 0]))
    equal = owned.roll(1, 0) | owned
    count = torch.full((3, 4), math.log(3))
    assert torch.allclose(layer_weights(count, equal), layer_weights(count * 0, equal))


def test_the_names_of_the_aggregations_are_these_weights(problem: Problem) -> None:
    layout = problem.layout
    owned = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 1], [0, 1, 0, 1]]).bool()
    update = torch.zeros(3, problem.dimension)
    simple = aggregation_weights("simple", owned, update, layout, 1.0)
    assert simple[:, 3].tolist() == pytest.approx([1 / 3] * 3)
    weighted = aggregation_weights("weighted", owned, update, layout, 1.0)
    assert weighted[:, 3].tolist() == pytest.approx([2 / 7, 3 / 7, 2 / 7])
    assert weighted[:, 2].tolist() == [0, 0, 0]


def test_attention_listens_more_to_small_updates(problem: Problem) -> None:
    layout, owned = problem.layout, torch.ones(2, 4, dtype=torch.bool)
    update = torch.ones(2, problem.dimension) * torch.tensor([[0.01], [0.1]])
    alpha = aggregation_weights("attention", owned, update, layout, 1.0)
    assert bool((alpha[0] > alpha[1]).all())
    cold = aggregation_weights("attention", owned, update, layout, 1e6)
    assert torch.allclose(cold, torch.full((2, 4), 0.5).double(), atol=1e-5)


def test_rules_train_the_share_of_layers_the_thesis_names() -> None:
    many = Stream.of(0, 0, "test", torch.arange(300))
    for rule, share in (("full", 1.0), ("opu3", 0.8), ("opu2", 0.6), ("lowerb", 0.4)):
        owned = assign(rule, 5, many)
        assert float(owned.double().mean()) == pytest.approx(share)
        assert set(owned.sum(1).tolist()) == {round(5 * share)}
    mixed = assign("opu1-2-3", 5, many).sum(1)
    assert set(mixed.tolist()) == {2, 3, 4}
    chosen = assign("opu2", 5, many)[:, :4].double().mean(0)
    assert bool(((chosen - 0.5).abs() < 0.1).all())


# Layer sizes as the thesis counts them (appendix C), and its spreads in percent of what LowerB
# clients send and of the models they hold at p = 0.5.
THESIS = {
    "cifar10": ([4864, 102464, 1638400, 1048576, 10240], 10815.25, 57.93),
    "cifar100": ([4864, 102464, 1638400, 1048576, 102400], 1522.91, 54.38),
    "fashion-mnist": ([1664, 102464, 1638400, 1048576, 10240], 13749.46, 58.18),
    "emnist-l": ([802816, 1048576, 1048576, 10240], 30.23, 6.60),
}


@pytest.mark.parametrize("data", THESIS)
def test_traffic_gives_the_percentages_of_the_thesis(data: str) -> None:
    sizes, sent, held = THESIS[data]
    owned = torch.eye(len(sizes) - 1, len(sizes), dtype=torch.bool)
    owned[:, -1] = True
    down, up = traffic(sizes, owned, 0.5)
    for values, expected in ((up, sent), (down, held)):
        spread = 100 * (values.max() - values.min()) / values.min()
        assert round(float(spread), 2) == expected


def test_the_networks_have_the_layers_the_traffic_counts() -> None:
    module = network("cnn")((3, 32, 32), 10)
    sizes = layer_sizes(Module(lambda: module).layout)
    assert sizes[:2] == [4864, 102464]
    assert [s - b for s, b in zip(sizes[2:], (1024, 1024, 10), strict=True)] == [
        1638400,
        1048576,
        10240,
    ]
    resnet = Module(lambda: network("resnet18")((3, 32, 32), 10)).layout
    assert sum(layer_sizes(resnet)) == resnet.dimension


@pytest.mark.parametrize("prune", ["random", "magnitude"])
def test_the_ledger_counts_what_the_formula_says(problem: Problem, prune: str) -> None:
    result = simulate(build("fedp3", **TRAINING, layers="opu2", keep=0.5, prune=prune), problem, 2)
    shapes, owned = problem.layout.shapes, result.server["owned"]
    weights = [math.prod(s) for s in shapes if len(s) > 1]
    biases = sum(math.prod(s) for s in shapes if len(s) == 1)
    down, _ = traffic(weights, owned, 0.5)
    _, up = traffic(layer_sizes(problem.layout), owned, 0.5)
    assert torch.equal(result.ledger.up_bits.double(), 2 * 32 * up)
    assert torch.allclose(result.ledger.down_bits.double(), 2 * 32 * (down + biases), atol=2 * 96)


def test_clients_apart_with_encoded_messages_agree_with_the_stack_on_a_network(
    problem: Problem,
) -> None:
    for name, options in (
        ("fedp3", {**TRAINING, "prune": "magnitude", "local_prune": "ordered", "cohort_size": 4}),
        ("fedspa", {"batch": 32, "mask_score": "symwanda"}),
        ("fedspa", {"batch": 32, "mask_score": "stochria", "search": "score"}),
        ("sub-fedavg", {"batch": 32, "min_accuracy": 0.1}),
    ):
        together = simulate(build(name, **options), problem, 2)
        apart = simulate(build(name, **options), problem, 2, clients_at_once=1, wire=True)
        assert torch.allclose(together.model, apart.model, atol=1e-6)
        assert together.history[-1]["bytes_up"] == apart.history[-1]["bytes_up"]


def test_class_sets_have_their_exact_size_and_even_shares() -> None:
    data = load("digits")
    parts = partition(data, "class-set:5", 20)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(data)))
    for part in parts:
        counts = np.unique(data.y[part].numpy(), return_counts=True)[1]
        assert len(counts) == 5
        assert counts.max() - counts.min() <= 4


def test_preferences_use_every_row_once_and_concentrate_on_a_few_classes() -> None:
    y = torch.arange(10.0).repeat(700)
    data = Dataset("labels", torch.zeros(7000, 1), y, 10)
    parts = partition(data, "preference:0.5", 100)
    assert sorted(torch.cat(parts).tolist()) == list(range(7000))
    assert {len(part) for part in parts} == {70}
    top = [np.sort(np.bincount(data.y[p].long().numpy(), minlength=10))[-4:].sum() for p in parts]
    assert 0.80 <= float(np.mean(top)) / 70 <= 0.88


def test_a_client_keeps_thirty_percent_for_its_test() -> None:
    problem = make_problem("digits", split="class-set:5", clients=20, client_test_share=0.3)
    assert problem.client_test is not None
    held = (problem.client_test.weights != 0).sum(1)
    share = held / (held + problem.counts)
    assert bool(((share - 0.3).abs() < 0.02).all())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"layers": "opu9"}, "opu9"),
        ({"layers": "drop:2-9"}, "2-9"),
        ({"prune": "lottery"}, "lottery"),
        ({"local_prune": "none"}, "none"),
        ({"aggregation": "median"}, "median"),
        ({"keep": 0.0}, "keep"),
        ({"q_min": 2.0}, "q_min"),
    ],
)
def test_a_wrong_option_is_named(problem: Problem, options: dict, word: str) -> None:
    with pytest.raises(SympruneError, match=word):
        simulate(build("fedp3", **options), problem, 1)


@pytest.mark.slow
def test_fewer_layers_and_stronger_pruning_cost_accuracy_in_the_order_of_the_thesis() -> None:
    """Digits over 20 clients with five classes each, sixty rounds, mean of two seeds."""

    def accuracy(layers: str, keep: float) -> float:
        total = 0.0
        for seed in (0, 1):
            problem = make_problem(
                "digits", "he-mlp:48-48-48-48", "class-set:5", 20, l2=0.0, seed=seed
            )
            algorithm = build("fedp3", layers=layers, keep=keep, batch=32)
            result = simulate(algorithm, problem, 60, seed=seed, evaluate_every=60)
            total += result.history[-1]["accuracy"] / 2
        return total

    full, opu3, opu2 = accuracy("full", 1.0), accuracy("opu3", 0.9), accuracy("opu2", 0.9)
    assert full - opu3 <= 0.02
    assert opu3 >= opu2 - 0.01
    lower = [accuracy("lowerb", keep) for keep in (1.0, 0.9, 0.7, 0.5)]
    assert opu2 > lower[1]
    assert lower[0] >= lower[3] + 0.1
    assert lower[1] > lower[2] > lower[3]
