"""What becomes of one matrix: score -> mask -> refine, from its weight and its statistics.

Knows tensors and a recipe, not models, so that whoever holds the statistics can decide: the engine
that measured them, or a server that was sent them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from symprune import masks
from symprune.errors import SympruneError
from symprune.recipe import Recipe
from symprune.stats import GRAM, MOMENTS, SQUARE, ChannelStats


@dataclass(frozen=True)
class Needs:
    """The statistics a run collects: of inputs and of outputs."""

    inputs: frozenset[str]
    outputs: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs)


def needs(recipe: Recipe, report_error: bool = False) -> Needs:
    """No more than the recipe, and the error report if wanted, make use of."""
    asked = recipe.criterion.needs
    inputs = {SQUARE} if "input_norm" in asked else set()
    if recipe.refinement is not None:
        inputs.add(recipe.refinement.needs)
    if recipe.weight_update is not None:
        inputs.add(recipe.weight_update.needs)
    if report_error:
        inputs |= {MOMENTS, GRAM}
    outputs = {SQUARE} if "output_norm" in asked else set()
    return Needs(frozenset(inputs), frozenset(outputs))


@dataclass
class Decision:
    """The keep-mask (`[out, in]`) of a matrix, its new weights if it was updated, and figures."""

    keep: Tensor
    weight: Tensor | None = None
    figures: dict[str, float] = field(default_factory=dict)


def decide(
    name: str,
    part: str,
    weight: Tensor,
    inputs: ChannelStats | None,
    outputs: ChannelStats | None,
    recipe: Recipe,
    report_error: bool = False,
    base: Tensor | None = None,
) -> Decision:
    """Which weights of the matrix `name` stay. Without statistics the weights alone decide.

    base is a mask made earlier; without it the recipe's criterion makes one.
    """
    _check_finite(name, weight, inputs, outputs)
    if base is None:
        base = _base_mask(name, weight, inputs, outputs, recipe)
    keep = base
    chosen = recipe.refinement
    if chosen is not None and inputs is not None and chosen.layers in ("all", part):
        keep = chosen(weight, base, inputs, recipe.n_of_m, recipe.method)
    decision = Decision(keep)
    if recipe.weight_update is not None and inputs is not None:
        decision.weight, decision.keep = recipe.weight_update(
            weight, keep, inputs, recipe.target_sparsity, recipe.n_of_m
        )
    if report_error and inputs is not None:
        decision.figures = errors(weight, base, decision, inputs)
    return decision


def _base_mask(
    name: str,
    weight: Tensor,
    inputs: ChannelStats | None,
    outputs: ChannelStats | None,
    recipe: Recipe,
) -> Tensor:
    rows, columns = weight.shape
    statistics: dict[str, Any] = {}
    if "input_norm" in recipe.criterion.needs:
        statistics["input_norm"] = inputs.norm if inputs else weight.new_ones(columns).float()
    if "output_norm" in recipe.criterion.needs:
        statistics["output_norm"] = outputs.norm if outputs else weight.new_ones(rows).float()
    if "generator" in recipe.criterion.needs:
        statistics["generator"] = generator_for(recipe.seed, name)
    score = recipe.criterion(weight, statistics, recipe.params)
    return masks.keep_mask(score, recipe.target_sparsity, recipe.group, recipe.n_of_m)


def errors(
    weight: Tensor, base: Tensor, decision: Decision, inputs: ChannelStats
) -> dict[str, float]:
    """||X(W~-W)||_F / ||XW||_F, and the mean over rows of the expected error's size, of the base
    mask and of what was decided."""
    weight = weight.float()
    pruned = weight * base
    final = weight * decision.keep if decision.weight is None else decision.weight
    return {
        "relative_error_base": relative_error(weight, pruned, inputs.gram),
        "relative_error": relative_error(weight, final, inputs.gram),
        "expected_error_before": float(((weight - pruned) @ inputs.mean).abs().mean()),
        "expected_error_after": float(((weight - final) @ inputs.mean).abs().mean()),
        "exchanged": int(masks.count_true((decision.keep & ~base).flatten())),
    }


def relative_error(weight: Tensor, changed: Tensor, gram: Tensor) -> float:
    """||X(W~-W)||_F / ||XW||_F from G = X^T X."""
    gram = gram.to(weight.device)
    lost, whole = (
        float(((m @ gram) * m).sum(dtype=torch.float64)) for m in (changed - weight, weight)
    )
    return (max(lost, 0.0) / whole) ** 0.5 if whole > 0 else 0.0


def _check_finite(
    name: str, weight: Tensor, inputs: ChannelStats | None, outputs: ChannelStats | None
) -> None:
    if not torch.isfinite(weight).all():
        raise SympruneError(f"{name} has NaN or infinite weights.")
    for stats in (inputs, outputs):
        if stats is not None and not stats.is_finite():
            raise SympruneError(f"{name} sees NaN or infinite activations.")


def generator_for(seed: int, name: str) -> torch.Generator:
    """A generator of its own for each matrix, so that no draw depends on the order of the work."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
