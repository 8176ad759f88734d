"""Masks in federated training: what is pruned stays zero everywhere, is not trained and not sent,
whatever the algorithm; and without masks nothing changes."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.algorithms import ALGORITHMS, build
from symprune.fed.algorithms.fedsparse.gates import Gated
from symprune.fed.problems.losses import Linear, Logistic, Module
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.optimum import minimise
from symprune.fed.problems.problem import Problem, Rows
from symprune.fed.protocol import Algorithm
from symprune.fed.simulate import Result, simulate
from symprune.maskset import MaskSet

ROUNDS = 3
SILENT = ("local",)  # sends nothing
SKETCHED = ("similarity-network", "sppm-as")  # a sketch of the data goes up first, whatever is kept
CODES = 20  # bytes of similarity-network's four values, which every message of it has
NEEDS_CONSTANTS = ("fedprox-sppm", "fedavg-sppm")  # their theory's steps, unknown for networks
STEPS = {"gamma": 0.05, "p": 0.5, "eta": 0.05, "step": 0.05}
OTHER_MEANING = {"similarity-network": ("p",), "pfedme": ("eta",)}


def random_masks(problem: Problem, share: float = 0.4) -> MaskSet:
    """Matrices with this share kept at random; one output of each is pruned as a whole."""
    generator, masks = torch.Generator().manual_seed(1), MaskSet()
    for name, shape in zip(problem.layout.names, problem.layout.shapes, strict=True):
        if len(shape) > 1 or len(problem.layout.names) == 1:
            keep = torch.rand(shape, generator=generator) < share
            keep[-1] = False
            masks[name] = keep
    return masks


def whole_masks(problem: Problem) -> MaskSet:
    masks = MaskSet()
    for name, shape in zip(problem.layout.names, problem.layout.shapes, strict=True):
        masks[name] = torch.ones(shape, dtype=torch.bool)
    return masks


@pytest.fixture(scope="module")
def convex() -> Problem:
    return make_problem("digits", split="class:2", clients=5, l2=0.1, client_test_share=0.2)


@pytest.fixture(scope="module")
def network() -> Problem:
    return make_problem("digits", "mlp:12-8", "class:2", clients=4, l2=0.01, client_test_share=0.2)


def chosen(name: str, problem: Problem) -> Algorithm:
    """With steps of its own where the problem's constants are unknown."""
    if not isinstance(problem.unmasked().loss, Module):
        return build(name)
    known = {f.name for f in fields(ALGORITHMS[name])} - set(OTHER_MEANING.get(name, ()))
    known -= {"gamma"} if name.endswith("sppm-as") else set()
    return build(name, **{option: value for option, value in STEPS.items() if option in known})


def kept(problem: Problem, masks: MaskSet) -> Tensor:
    return torch.cat(
        [
            masks[name].flatten() if name in masks else torch.ones(size, dtype=torch.bool)
            for name, size in zip(problem.layout.names, problem.layout.sizes, strict=True)
        ]
    )


def check_zeros(result: Result, problem: Problem, masks: MaskSet) -> None:
    keep = kept(problem, masks)
    assert result.model.shape == keep.shape
    assert not result.model[~keep].any()
    closed = isinstance(result.algorithm, Gated)  # so short a run may close all gates
    assert closed or bool(result.model[keep].any())
    for state in (result.server, result.client):
        for name, tensor in state.items():  # control variates, momentum, personal models, ...
            assert len(keep) not in tensor.shape, name
    restricted = problem.masked(masks)
    personal = result.algorithm.personal_models(result.server, result.client, restricted)
    if personal is not None:
        assert not restricted.layout.scatter(personal)[:, ~keep].any()


def sent(result: Result, way: str) -> float:
    """Bytes of a run; where a sketch of the data comes first, without the turn that has it."""
    first = result.history[1][way] if result.algorithm.name in SKETCHED else 0
    return result.history[-1][way] - first


def most_behind_gates(algorithm: Gated, kept_weights: int) -> int:
    """Bytes of a message when all gates are open: kept weights, with SCAFFOLD their control
    variates as well, thresholds and gates, and the names of the fields."""
    vectors = 2 if algorithm.name == "fedsparse-scaffold" else 1
    gates = 10  # one for each neuron
    return 4 * vectors * kept_weights + 2 * 4 * gates + 100


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_zeros_stay_and_only_what_is_kept_is_sent(name: str, convex: Problem) -> None:
    masks = random_masks(convex)
    x0 = torch.randn(convex.dimension, generator=torch.Generator().manual_seed(2)) / 10
    dense = simulate(build(name), convex, ROUNDS, x0=x0)
    sparse = simulate(build(name), convex, ROUNDS, x0=x0, masks=masks)
    check_zeros(sparse, convex, masks)
    for way in ("bytes_up", "bytes_down"):
        if isinstance(sparse.algorithm, Gated):  # which gates are open differs between the runs
            most = most_behind_gates(sparse.algorithm, int(kept(convex, masks).sum()))
            assert 0 < sparse.history[-1][way] <= ROUNDS * convex.clients * most
        elif name not in SILENT:
            codes = CODES * ROUNDS * convex.clients if name == "similarity-network" else 0
            limit = 1.1 * (1 - masks.sparsity())
            assert sent(sparse, way) - codes < limit * sent(dense, way)
    assert sparse.history[-1]["loss"] < 10 * sparse.history[0]["loss"]


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - set(NEEDS_CONSTANTS)))
def test_networks_keep_their_zeros_layer_by_layer(name: str, network: Problem) -> None:
    masks = random_masks(network)
    algorithm = chosen(name, network)
    sparse = simulate(algorithm, network, ROUNDS, masks=masks)
    check_zeros(sparse, network, masks)
    assert bool(torch.isfinite(sparse.model).all())


@pytest.mark.parametrize("name", NEEDS_CONSTANTS)
def test_who_cannot_train_a_network_says_so(name: str, network: Problem) -> None:
    with pytest.raises(SympruneError, match=f"{name} needs a model with known smoothness"):
        simulate(build(name), network, 1, masks=random_masks(network))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_masks_that_keep_everything_change_no_bit(name: str, convex: Problem) -> None:
    plain = simulate(build(name), convex, ROUNDS)
    masked = simulate(build(name), convex, ROUNDS, masks=whole_masks(convex))
    assert plain.history == masked.history
    assert torch.equal(plain.model, masked.model)
    assert all(torch.equal(plain.server[k], masked.server[k]) for k in plain.server)
    assert all(torch.equal(plain.client[k], masked.client[k]) for k in plain.client)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - set(NEEDS_CONSTANTS)))
def test_networks_with_masks_that_keep_everything_change_no_bit(
    name: str, network: Problem
) -> None:
    algorithm = chosen(name, network)
    plain = simulate(algorithm, network, 2)
    masked = simulate(algorithm, network, 2, masks=whole_masks(network))
    assert plain.history == masked.history
    assert all(torch.equal(plain.client[k], masked.client[k]) for k in plain.client)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_clients_alone_and_resumed_runs_with_masks_give_the_same_bits(
    name: str, convex: Problem, tmp_path: Path
) -> None:
    masks, file = random_masks(convex), tmp_path / "run.safetensors"
    together = simulate(build(name), convex, ROUNDS, masks=masks)
    simulate(build(name), convex, 1, masks=masks, checkpoint=file, clients_at_once=1, wire=True)
    again = simulate(
        build(name), convex, ROUNDS, masks=masks, checkpoint=file, clients_at_once=1, wire=True
    )
    assert again.history == together.history
    assert all(torch.equal(again.server[k], together.server[k]) for k in together.server)
    assert all(torch.equal(again.client[k], together.client[k]) for k in together.client)


def test_fedavg_with_masks_is_fedavg_that_masks_every_gradient(network: Problem) -> None:
    masks = random_masks(network)
    keep = kept(network, masks)
    x = network.initial(0) * keep
    for _ in range(2):
        w = x.expand(network.clients, -1)
        for _ in range(3):
            w = (w - 0.1 * network.gradient(w)) * keep
        x = w.mean(0)
    fedavg = build("fedavg", gamma=0.1, p=1 / 3, random_steps=False)
    result = simulate(fedavg, network, 2, masks=masks)
    assert torch.allclose(result.model, x, atol=1e-6)
    assert torch.equal(network.layout.split(result.model)["1.bias"], result.parameters["1.bias"])


def test_a_message_has_the_bytes_of_the_kept_weights(network: Problem) -> None:
    masks = random_masks(network)
    count = int(kept(network, masks).sum())
    result = simulate(build("fedavg", gamma=0.1, p=1.0), network, 2, masks=masks)
    values = 4 * count * network.clients * 2
    assert values < result.history[-1]["bytes_up"] < values + 10 * network.clients * 2
    assert result.history[-1]["paper_bits_up"] == 2 * 32 * count


def test_the_start_is_cut_to_the_masks_whichever_way_it_is_given(convex: Problem) -> None:
    masks = random_masks(convex)
    restricted = convex.masked(masks)
    start = torch.arange(convex.dimension) / convex.dimension
    runs = [
        simulate(build("gd"), convex, 1, masks=masks, x0=start),
        simulate(build("gd"), restricted, 1, x0=start),
        simulate(build("gd"), restricted, 1, x0=restricted.layout.gather(start)),
    ]
    assert runs[0].history == runs[1].history == runs[2].history
    assert float(runs[0].history[0]["loss"]) == convex.mean_value(start * kept(convex, masks))
    assert restricted.evaluate(runs[0].model) == convex.evaluate(runs[0].model)


def test_the_central_optimum_is_that_of_the_kept_weights() -> None:
    problem = make_problem("breast-cancer", clients=3, l2=0.1, dtype="float64")
    masks = random_masks(problem)
    keep = kept(problem, masks)
    restricted = problem.masked(masks)
    optimum = minimise(restricted)
    assert optimum.shape == (int(keep.sum()),)
    assert float(restricted.mean_gradient(optimum).norm()) < 1e-12
    columns = replace(
        problem,
        loss=Logistic(len(optimum)),
        rows=replace(problem.rows, x=problem.rows.x[..., keep]),
    )
    assert torch.allclose(optimum, minimise(columns))
    assert pytest.approx(columns.constants().L) == restricted.constants().L
    result = simulate(build("proxskip"), problem, 60, masks=masks, optimum=optimum)
    assert result.history[-1]["gap"] < 1e-4 * result.history[0]["gap"]


def test_normal_equations_are_cut_to_the_kept_rows_and_columns() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(3, 20, generator=generator, dtype=torch.float64)
    from symprune.fed.problems.quadratic import normal_equations

    problem = normal_equations(list(zip(x, y, strict=True)), 0.1)
    masks = {"weight": torch.tensor([True, False, True, True, False, True])}
    restricted = problem.masked(masks)
    cut = list(zip(x[..., masks["weight"]], y, strict=True))
    assert torch.allclose(minimise(restricted), minimise(normal_equations(cut, 0.1)))
    w = torch.randn(6, generator=generator, dtype=torch.float64) * masks["weight"]
    assert restricted.mean_value(w) == pytest.approx(problem.mean_value(w))
    assert isinstance(restricted.loss.loss, Linear)  # type: ignore[attr-defined]


def test_what_does_not_fit_the_model_is_named(convex: Problem) -> None:
    whole = torch.ones(10, 65, dtype=torch.bool)
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({"head.weight": whole}, r"no parameter head.weight.*it has weight"),
        ({"weight": whole[:, :64]}, r"mask of weight is .*\(10, 64\), the parameter \(10, 65\)"),
        ({"weight": whole.float()}, "float32"),
        ({"weight": ~whole}, "keep no weight"),
    ]
    for masks, sentence in cases:
        with pytest.raises(SympruneError, match=sentence):
            simulate(build("gd"), convex, 1, masks=masks)
    with pytest.raises(SympruneError, match="has masks already"):
        convex.masked({"weight": whole}).masked({"weight": whole})


def test_a_run_does_not_go_on_with_other_masks(convex: Problem, tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    simulate(build("gd"), convex, 1, masks=random_masks(convex), checkpoint=file)
    for masks in (random_masks(convex, 0.5), None):
        with pytest.raises(SympruneError, match="another run"):
            simulate(build("gd"), convex, 2, masks=masks, checkpoint=file)


def test_a_tensor_that_is_pruned_whole_is_no_obstacle(network: Problem) -> None:
    masks = random_masks(network)
    masks["3.weight"] = torch.zeros(8, 12, dtype=torch.bool)
    for name in ("fedavg-epochs", "fedspa", "sub-fedavg", "fedp3", "fedsparse", "feddrop"):
        result = simulate(chosen(name, network), network, 2, masks=masks)
        check_zeros(result, network, masks)


def test_rows_of_a_problem_are_those_of_the_unmasked_one(convex: Problem) -> None:
    restricted = convex.masked(random_masks(convex))
    assert isinstance(restricted.rows, Rows) and restricted.rows is convex.rows
    assert restricted.unmasked().dimension == convex.dimension
