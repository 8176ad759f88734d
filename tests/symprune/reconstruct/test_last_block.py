"""The last block is trained on what the head predicts from it."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch

import symprune
from symprune import Recipe
from symprune.engine.predictions import PREDICTED, Predictions
from symprune.engine.reconstruct import AFTER, APART, NEARER

HELD_OUT = families.tokens(4, seed=9)
WAYS = ("outputs", "predictions")


def prune(model: Any, last: str, **changes: Any) -> Any:
    fitted = {"name": "block", "epochs": 3, "last": last, "last_rate": 0.01}
    recipe = Recipe(method="magnitude", reconstruct=fitted, **changes)
    return symprune.prune(model, families.tokens(10), recipe, held_out=HELD_OUT)


@torch.no_grad()
def divergence(dense: Any, model: Any) -> float:
    """The mean KL on the held-out windows, in the plainest way."""
    aim, own = (each(HELD_OUT).logits.double().log_softmax(-1) for each in (dense, model))
    return float((aim.exp() * (aim - own)).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma3n", "zamba2"])
def test_held_out_predictions_come_nearer_by_as_much_as_is_told(family: str) -> None:
    dense, found = families.model(family), {}
    for last in WAYS:
        model = families.model(family)
        found[last] = (prune(model, last), divergence(dense, model))
    report, apart = found["predictions"]
    told = [layer.figures for layer in report.layers if APART in layer.figures][-1]
    assert told[NEARER] <= told[APART]
    assert told[APART] == pytest.approx(found["outputs"][1], rel=1e-3, abs=1e-7)
    assert told[NEARER] == pytest.approx(apart, rel=1e-3, abs=1e-7)
    assert not any(APART in layer.figures for layer in found["outputs"][0].layers)
    errors = [[layer.figures.get(AFTER) for layer in found[last][0].layers] for last in WAYS]
    changed = [before != after for before, after in zip(*errors, strict=True)]
    ended = [APART in layer.figures for layer in report.layers]
    assert not any(changed) or changed == ended
    assert any(changed) == (told[NEARER] < told[APART])


@pytest.mark.parametrize("changes", [{}, {"values": "int4"}, {"pattern": "2:4", "sparsity": None}])
def test_only_the_last_block_changes_and_its_zeros_stay(changes: dict[str, Any]) -> None:
    models = [families.model() for _ in WAYS]
    reports = [prune(model, last, **changes) for model, last in zip(models, WAYS, strict=True)]
    before, after = (dict(model.named_parameters()) for model in models)
    last = f".layers.{len(models[0].model.layers) - 1}."
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed and all(last in name for name in changed)
    for name, keep in reports[1].masks.items():
        assert torch.equal(keep, reports[0].masks[name]) and not after[name][~keep].any()


@pytest.mark.parametrize(("length", "vocabulary"), [(7, 100), (512, 49152), (2048, 128256)])
def test_a_step_predicts_so_many_numbers_at_most(length: int, vocabulary: int) -> None:
    tokens = torch.zeros(5, length, dtype=torch.long)
    made: Any = Predictions(None, tokens, None, None, vocabulary)  # type: ignore[arg-type]
    for sample in range(5):
        positions = made._positions(sample)
        assert 0 < len(positions) * vocabulary <= max(PREDICTED, vocabulary)
        assert 2 * len(positions) >= min(length, PREDICTED // vocabulary)
        assert positions[-1] < length
