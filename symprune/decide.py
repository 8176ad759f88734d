"""What becomes of one matrix: score -> mask -> refine, from its weight and its statistics.

Knows tensors and a recipe, not models, so that whoever holds the statistics can decide: the engine
that measured them, or a server that was sent them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from symprune import masks
from symprune.recipe import Recipe
from symprune.stats import GRAM, MOMENTS, SQUARE, ChannelStats, Needs
from symprune.updates import LeastSquares


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
    return Needs(frozenset(inputs), frozenset(outputs), recipe.token_limit)


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
    removed: int | None = None,
    held_out: ChannelStats | None = None,
) -> Decision:
    """Which weights of the matrix `name` stay. Without statistics the weights alone decide.

    base is a mask made earlier; without it the recipe's criterion makes one that removes `removed`
    weights, or what the recipe says. held_out are statistics of tokens that decide nothing: the
    error is measured on them as well.
    """

    def mask_of(values: Tensor, share: float = 1.0) -> Tensor:
        score = _score(name, values, inputs, outputs, recipe)
        return _mask(score, recipe, removed, share)

    if base is None:
        base = mask_of(weight)
    keep = base
    chosen, update = recipe.refinement, recipe.weight_update
    if chosen is not None and inputs is not None and chosen.layers in ("all", part):
        keep = chosen(weight, base, inputs, recipe.n_of_m, recipe.method)
    decision = Decision(keep)
    if update is not None and inputs is not None:
        if isinstance(update, LeastSquares) and recipe.rounds > 1:
            fitted = update.in_rounds(weight, inputs, mask_of)
        else:
            share = recipe.target_sparsity if removed is None else removed / weight.numel()
            fitted = update(weight, keep, inputs, share, recipe.n_of_m)
        decision.weight, decision.keep = fitted
    if report_error and inputs is not None:
        decision.figures = errors(weight, base, decision, inputs)
    if held_out is not None:
        decision.figures |= held_out_errors(weight, base, decision, held_out)
    return decision


def _mask(score: Tensor, recipe: Recipe, removed: int | None, share: float) -> Tensor:
    if recipe.n_of_m is not None:
        return masks.keep_nested(score, recipe.n_of_m, share)
    if removed is None:
        rows, columns = score.shape
        removed = masks.removed_from(rows, columns, recipe.target_sparsity, recipe.group)
    if share < 1 and recipe.group == "row":  # whole rows on the way
        return masks.drop_lowest(score, int(share * removed) // len(score))
    return masks.keep_count(score, int(share * removed) if share < 1 else removed, recipe.group)


def _score(
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
    return recipe.criterion(weight, statistics, recipe.params)


def errors(
    weight: Tensor, base: Tensor, decision: Decision, inputs: ChannelStats
) -> dict[str, float]:
    """||X(W~-W)||_F / ||XW||_F, and the mean over rows of the expected error's size, of the base
    mask and of what was decided."""
    pruned, final = _before_and_after(weight, base, decision)
    weight = weight.float()
    relative = relative_errors(weight, (pruned, final), inputs.gram)
    return {
        "relative_error_base": relative[0],
        "relative_error": relative[1],
        "expected_error_before": float(((weight - pruned) @ inputs.mean).abs().mean()),
        "expected_error_after": float(((weight - final) @ inputs.mean).abs().mean()),
        "exchanged": int(masks.count_true((decision.keep & ~base).flatten())),
    }


def held_out_errors(
    weight: Tensor, base: Tensor, decision: Decision, held_out: ChannelStats
) -> dict[str, float]:
    """The relative errors before and after, on tokens that decided nothing."""
    pruned, final = _before_and_after(weight, base, decision)
    weight = weight.float()
    before, after = relative_errors(weight, (pruned, final), held_out.gram)
    return {"held_out_error_base": before, "held_out_error": after}


def _before_and_after(weight: Tensor, base: Tensor, decision: Decision) -> tuple[Tensor, Tensor]:
    weight = weight.float()
    changed = decision.weight
    return weight * base, weight * decision.keep if changed is None else changed


def relative_errors(weight: Tensor, changed: Iterable[Tensor], gram: Tensor) -> list[float]:
    """||X(W~-W)||_F / ||XW||_F from G = X^T X, for each W~."""
    gram = gram.to(weight.device)

    def size(m: Tensor) -> float:
        return float(((m @ gram) * m).sum(dtype=torch.float64))

    whole = size(weight)
    lost = (max(size(m - weight), 0.0) for m in changed)
    return [(part / whole) ** 0.5 if whole > 0 else 0.0 for part in lost]


def generator_for(seed: int, name: str) -> torch.Generator:
    """A generator of its own for each matrix, so that no draw depends on the order of the work."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
