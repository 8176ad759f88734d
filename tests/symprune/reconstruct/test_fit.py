"""The fit itself, on a block that is one function of a few tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from symprune import Recipe, SympruneError
from symprune.reconstruct.fit import BlockReconstruction, Problem, fit, importance_of
from symprune.reconstruct.weights import GridWeights, MaskedWeights
from symprune.values.grid import GRIDS
from symprune.values.scales import round_to_grid

WIDTH, TOKENS, SAMPLES = 24, 32, 10
FITTING, WATCHING = range(8), range(8, SAMPLES)
OPTIONS = BlockReconstruction(epochs=6, rate=0.02, scale_rate=0.01)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated() -> Tensor:
    """Inputs whose channels tell of each other, so that one weight can do for another."""
    return drawn(SAMPLES, TOKENS, 6) @ drawn(6, WIDTH, seed=3) / 2


def problem(inputs: Tensor, dense: Tensor) -> Problem:
    """x + tanh(x W^T), from half of W's weights."""

    def run(weights: Mapping[str, Tensor], sample: int) -> Tensor:
        x = inputs[sample : sample + 1]
        return x + torch.tanh(x @ weights["weight"].mT)

    with torch.no_grad():
        targets = [run({"weight": dense}, sample) for sample in range(len(inputs))]
    return Problem(run, lambda sample: targets[sample], torch.ones(len(inputs), TOKENS), 1.0)


def halved(dense: Tensor) -> Tensor:
    return dense.abs() >= dense.abs().median()


def trained_on(options: BlockReconstruction, seed: int = 0) -> tuple[MaskedWeights, list[float]]:
    inputs, dense = correlated(), drawn(WIDTH, WIDTH, seed=1) / 5
    keep = halved(dense)
    weights = MaskedWeights(dense * keep, keep, torch.float32)
    order = torch.Generator().manual_seed(seed)
    found = fit({"weight": weights}, problem(inputs, dense), FITTING, WATCHING, options, order)
    return weights, [found.before, found.after]


def test_the_error_on_windows_that_are_not_trained_on_falls_and_zeros_stay_zero() -> None:
    weights, (before, after) = trained_on(OPTIONS)
    assert after < 0.7 * before
    assert not weights.written()[weights.removed].any()


def test_the_same_order_gives_the_same_bits_and_another_does_not() -> None:
    first, again, other = trained_on(OPTIONS), trained_on(OPTIONS), trained_on(OPTIONS, seed=1)
    assert torch.equal(first[0].leaf, again[0].leaf)
    assert not torch.equal(first[0].leaf, other[0].leaf)


def test_weights_that_only_get_worse_stay_as_they_were() -> None:
    weights, (before, after) = trained_on(replace(OPTIONS, rate=50.0))
    dense = drawn(WIDTH, WIDTH, seed=1) / 5
    assert after == before
    assert torch.equal(weights.written(), dense * halved(dense))


def test_a_fit_that_brings_nothing_ends_early() -> None:
    inputs, dense = correlated(), drawn(WIDTH, WIDTH, seed=1) / 5
    everything = torch.ones_like(dense, dtype=torch.bool)
    weights = MaskedWeights(dense, everything, torch.float32)
    passed: list[int] = []
    found = fit(
        {"weight": weights}, problem(inputs, dense), FITTING, WATCHING,
        replace(OPTIONS, epochs=8), torch.Generator().manual_seed(0), passed.append,
    )  # fmt: skip
    assert found.epochs == 6 and len(passed) == 6 * len(FITTING)
    assert found.before == found.after == 0 and torch.equal(weights.written(), dense)


def test_what_is_judged_is_what_will_be_written() -> None:
    inputs, dense = correlated(), drawn(WIDTH, WIDTH, seed=1) / 5
    keep = halved(dense)
    weights = MaskedWeights((dense * keep).bfloat16().float(), keep, torch.bfloat16)
    posed = problem(inputs, dense)
    order = torch.Generator().manual_seed(0)
    found = fit({"weight": weights}, posed, FITTING, WATCHING, OPTIONS, order)
    written = weights.written()
    assert torch.equal(written, written.bfloat16().float())
    errors = [float(posed.loss({"weight": written}, sample)) for sample in WATCHING]
    assert found.after == pytest.approx(sum(errors) / len(errors), rel=1e-6)


@pytest.mark.parametrize("kind", ["int4", "int3", "int2"])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_on_a_grid_stay_on_it_and_get_better(kind: str, transposed: bool) -> None:
    inputs, dense = correlated(), drawn(WIDTH, WIDTH, seed=1) / 5
    keep = halved(dense)
    start = round_to_grid(dense, GRIDS[kind], keep)
    stored = start.dense(keep).T if transposed else start.dense(keep)
    mask = keep.T if transposed else keep
    weights = GridWeights(stored, mask, {"only": start}, transposed)
    assert torch.equal(weights.written(), stored)
    posed = problem(inputs, dense)
    turned = replace(
        posed,
        run=lambda w, s: posed.run({"weight": w["weight"].T if transposed else w["weight"]}, s),
    )
    order = torch.Generator().manual_seed(0)
    found = fit({"weight": weights}, turned, FITTING, WATCHING, OPTIONS, order)
    assert found.after < 0.9 * found.before
    values = weights.values()["only"]
    made = values.dense(keep)
    assert torch.equal(weights.written(), made.T if transposed else made)
    assert not values.codes[~keep].any() and values.scales.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_weights_start_where_they_were_before_they_were_rounded(kind: str) -> None:
    """If that is nearest to their codes; a code that is not is as good as its word."""
    weight = drawn(4, 100)
    keep = halved(weight)
    values = round_to_grid(weight, GRIDS[kind], keep)
    near = GridWeights(weight, keep, {"only": values}, False, {"only": weight})
    torch.testing.assert_close(near.leaf.detach(), weight * keep)
    far = GridWeights(weight, keep, {"only": values}, False, {"only": weight.flip(1)})
    moved = far.leaf.detach() != values.dense(keep)
    assert moved[keep].float().mean() > 0.5
    for each in (near, far):
        assert torch.equal(each.written(), values.dense(keep))


@pytest.mark.parametrize("kind", ["int4"])
@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_the_gradient_of_a_scale_is_that_of_what_it_multiplies(kind: str, scale: float) -> None:
    """Against LSQ's formula, with weights inside the levels and beyond them."""
    grid = GRIDS[kind]
    weight = drawn(3, 64) * 4
    keep = torch.ones_like(weight, dtype=torch.bool)
    weights = GridWeights(weight, keep, {"only": round_to_grid(weight, grid)}, False)
    with torch.no_grad():
        weights.leaf.copy_(weight)
        weights.scales.fill_(scale)
    gradient = drawn(3, 64, seed=2)
    weights.made().backward(gradient)
    ratio = weight / scale
    level = grid.nearest(ratio)
    beyond = (ratio < grid.least) | (ratio > grid.most)
    assert beyond.any() and not beyond.all()
    by_scale = torch.where(beyond, level, level - ratio)
    assert weights.scales.grad is not None and weights.leaf.grad is not None
    expected = (by_scale * gradient).sum(1, keepdim=True)
    torch.testing.assert_close(weights.scales.grad, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(weights.leaf.grad, gradient.masked_fill(beyond, 0))


def test_a_huge_token_counts_as_a_few_usual_ones() -> None:
    sizes = torch.tensor([1.0, 1.0, 1.0, 1.0, 1000.0])
    counts = importance_of(sizes) * sizes.square()
    assert counts[-1] < 30 * counts[0]
    assert torch.isfinite(importance_of(torch.zeros(4))).all()


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 0},
        {"rate": -1},
        {"batch": 0},
        {"inputs": "both"},
        {"scale_rate": -1},
        {"last": "all"},
        {"last_rate": 0},
        {"last_batch": 0},
        {"pace": 1},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(SympruneError):
        Recipe(reconstruct={"name": "block", **options})
