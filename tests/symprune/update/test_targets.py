"""What weights are fitted to: the layer's own outputs, or the dense model's."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from torch import Tensor

import symprune
from symprune import Recipe
from symprune.engine.report import SHARE
from symprune.stats import DRIFT, GRAM, ChannelStats
from symprune.update.targets import aim, correction

LSQ = {"name": "lsq", "rounds": 2, "iters": 4}


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measured(x: Tensor, dense: Tensor) -> ChannelStats:
    stats = ChannelStats(x.shape[-1], {GRAM, DRIFT})
    stats.add(x, dense)
    return stats


def recoverable(samples: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs of the dense model, and the same as what was lost before can be undone: mixed by a
    matrix, with a little noise."""
    dense = drawn(samples, 64, 12, seed=seed)
    mixing = torch.eye(12) + 0.3 * drawn(12, 12, seed=100)
    return dense @ mixing + 0.05 * drawn(samples, 64, 12, seed=seed + 1), dense


def error(x: Tensor, dense: Tensor, weight: Tensor, fitted: Tensor) -> float:
    return float((dense @ weight.T - x @ fitted.T).square().sum())


def test_the_correction_is_least_squares_against_the_dense_outputs() -> None:
    x, dense = recoverable()
    weight, stats = drawn(5, 12, seed=3), measured(x, dense)
    flat, lost = x.flatten(0, 1).double(), (dense - x).flatten(0, 1).double()
    gram = flat.T @ flat
    damped = gram + torch.diag(0.01 * gram.diagonal().mean() + 2 * stats.noise * gram.diagonal())
    expected = torch.linalg.solve(damped, flat.T @ lost @ weight.double().T).T
    found = correction(weight, stats)
    assert found is not None
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("targets", "shares"), [("dense", {1.0}), ("mixed", {0.25, 0.5})])
def test_where_what_was_lost_can_be_made_up_for_the_error_falls(
    targets: str, shares: set[float]
) -> None:
    x, dense = recoverable()
    weight = drawn(5, 12, seed=3)
    held_out = recoverable(2, seed=7)
    fitted, share = aim(weight, measured(x, dense), measured(*held_out), targets)
    assert share in shares
    assert error(*held_out, weight, fitted) < 0.5 * error(*held_out, weight, weight)


def test_a_share_that_raises_the_error_on_held_out_tokens_is_refused() -> None:
    """There the loss has the other sign, so what helps here does harm."""
    x, dense = recoverable()
    weight, (other, others_dense) = drawn(5, 12, seed=3), recoverable(2, seed=7)
    against = measured(other, 2 * other - others_dense)
    for targets in ("dense", "mixed"):
        fitted, share = aim(weight, measured(x, dense), against, targets)
        assert share == 0 and fitted is weight


def test_the_best_of_the_shares_is_taken() -> None:
    """Held-out tokens lost a quarter as much."""
    x, dense = recoverable()
    other, others_dense = recoverable(2, seed=7)
    weight = drawn(5, 12, seed=3)
    less = other + (others_dense - other) / 4
    assert aim(weight, measured(x, dense), measured(other, less), "mixed")[1] == 0.25


def test_drift_is_the_same_however_samples_are_split() -> None:
    x, dense = drawn(6, 9, 7, seed=0), drawn(6, 9, 7, seed=1)
    whole = measured(x, dense)
    parts = [ChannelStats(7, {GRAM, DRIFT}, gram_scale=whole.gram_scale) for _ in range(2)]
    for number in (5, 0, 3, 1, 4, 2):
        parts[number % 2].add(x[number], dense[number])
    parts[1].merge(parts[0])
    assert torch.equal(parts[1].drift, whole.drift)
    again = ChannelStats(7, {GRAM, DRIFT})
    again.load({name: value.clone() for name, value in parts[1].state().items()})
    assert torch.equal(again.drift, whole.drift)
    flat, other = x.flatten(0, 1).double(), dense.flatten(0, 1).double()
    torch.testing.assert_close(whole.drift.double(), (other - flat).T @ flat, rtol=1e-5, atol=1e-5)


def prune(recipe: Recipe, samples: int, family: str = "llama") -> tuple[Any, Any]:
    model = families.model(family)
    held_out = families.tokens(4, 24, seed=9)
    return model, symprune.prune(model, families.tokens(samples, 24), recipe, held_out=held_out)


@pytest.mark.parametrize("targets", ["mixed", "dense"])
def test_with_too_few_tokens_a_channel_it_is_own_to_the_bit(targets: str) -> None:
    recipe = Recipe(method="wanda", update=LSQ, targets=targets)
    model, report = prune(recipe, 2)
    own, _ = prune(recipe.with_changes(targets="own", sequential=True), 2)
    for name, parameter in own.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name
    assert "0 of 14 matrices are fitted to the dense model's outputs" in report.notes[-2]
    assert "fewer than 10 tokens a channel: 2 x mlp.down_proj" in report.notes[-1]


def test_the_first_group_has_lost_nothing_yet() -> None:
    _, report = prune(Recipe(method="wanda", update=LSQ, targets="dense"), 40)
    shares = {layer.name: layer.figures[SHARE] for layer in report.layers}
    first = [
        shares[name] for name in shares if "layers.0.self_attn" in name and "o_proj" not in name
    ]
    assert first == [0, 0, 0]
    assert any(share == 1 for share in shares.values())


@pytest.mark.parametrize(
    "step",
    [
        {"update": "sparsegpt"}, {"update": "lsq", "refine": "swap"}, {"values": "int4"},
        {"values": "int3", "sparsity": 0}, {"update": LSQ, "values": "int4", "pattern": "2:4"},
        {"update": "lsq", "token_limit": 2.0, "group": "layer"},
    ],
    ids=str,
)  # fmt: skip
def test_every_step_that_fits_weights_fits_the_targets(step: dict[str, Any]) -> None:
    model, report = prune(Recipe(method="wanda", targets="dense", **step), 40)
    own, _ = prune(Recipe(method="wanda", sequential=True, **step), 40)
    weights = dict(own.named_parameters())
    assert any(layer.figures[SHARE] == 1 for layer in report.layers)
    assert any(not torch.equal(p, weights[name]) for name, p in model.named_parameters())
    for name, keep in report.masks.items():
        assert not dict(model.named_parameters())[name][~keep].any()


def test_experts_are_fitted_to_their_own_outputs() -> None:
    _, report = prune(Recipe(method="wanda", update="lsq", targets="dense"), 40, "mixtral")
    kinds = {layer.kind for layer in report.layers if SHARE in layer.figures}
    assert kinds and all("self_attn" in kind for kind in kinds)
    assert any(note.startswith("Fitted to their own outputs, experts") for note in report.notes)


def test_a_matrix_that_is_used_twice_is_fitted_to_its_own_outputs() -> None:
    """Nobody knows which of its inputs goes with which of the dense model's."""
    _, report = prune(Recipe(method="wanda", update="lsq", targets="dense"), 24, "gemma3n")
    shares = {layer.kind: layer.figures.get(SHARE) for layer in report.layers}
    assert shares["altup.modality_router"] is None
    assert any(share == 1 for share in shares.values())
