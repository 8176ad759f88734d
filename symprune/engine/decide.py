"""What becomes of one matrix: score -> mask -> refine -> update -> values, from its weight and its
statistics.

Knows tensors and a recipe, not models, so that whoever holds the statistics can decide: the engine
that measured them, or a server that was sent them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from symprune import masks
from symprune.errors import SympruneError
from symprune.machine import host
from symprune.recipe import Recipe
from symprune.stats import DRIFT, GRAM, MOMENTS, SQUARE, ChannelStats, Needs
from symprune.update.targets import OWN
from symprune.values.grid import OnGrid
from symprune.values.scales import round_to_grid


def needs(recipe: Recipe, report_error: bool = False) -> Needs:
    """No more than the recipe, and the error report if wanted, make use of."""
    asked = () if recipe.keeps_all else recipe.criterion.needs
    gradients = "regional_gradient" in asked
    inputs = {SQUARE} if "input_norm" in asked or gradients else set()
    steps = (recipe.refinement, recipe.weight_update, recipe.rounding)
    inputs |= {step.needs for step in steps if step is not None and step.needs}
    if report_error:
        inputs |= {MOMENTS, GRAM}
    if recipe.targets != OWN:
        inputs.add(DRIFT)
    outputs = {SQUARE} if "output_norm" in asked else set()
    return Needs(frozenset(inputs), frozenset(outputs), recipe.token_limit, gradients)


@dataclass
class Decision:
    """The keep-mask (`[out, in]`) of a matrix, its new weights if they changed, the same as they
    are on a grid if they are, what was rounded to it if that is asked for, and figures."""

    keep: Tensor
    weight: Tensor | None = None
    values: OnGrid | None = None
    unrounded: Tensor | None = None
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
    gradients: ChannelStats | None = None,
) -> Decision:
    """Which weights of the matrix `name` stay. Without statistics the weights alone decide.

    base is a mask made earlier; without it the recipe's criterion makes one that removes `removed`
    weights, or what the recipe says, if anything starts from it or is compared with it. held_out
    are statistics of tokens that decide nothing: the error is measured on them as well. gradients
    have a channel for every weight.
    """

    def mask_of(values: Tensor, share: float = 1.0) -> Tensor:
        found = score(name, values, inputs, outputs, recipe, gradients)
        return _mask(found, recipe, removed, share)

    whole = base is None and recipe.keeps_all
    if whole:
        base = torch.ones_like(weight, dtype=torch.bool)
    update = recipe.weight_update if inputs is not None else None
    watched = held_out is not None or (report_error and inputs is not None)
    if base is None and (watched or update is None or not update.finds_mask):
        base = mask_of(weight)
    if update is not None and inputs is not None and update.finds_mask:
        share = recipe.target_sparsity if removed is None else removed / weight.numel()
        decision = Decision(*update.find(weight, inputs, mask_of, share, recipe.n_of_m))
    else:
        assert base is not None
        decision = _from_base(part, weight, base, inputs, recipe)
    if recipe.rounding is not None:
        _put_on_grid(decision, weight, inputs, recipe, whole)
    if base is not None and watched:
        measured = inputs if report_error else None
        decision.figures = _figures(weight, base, decision, measured, held_out)
    return decision


def _put_on_grid(
    decision: Decision, weight: Tensor, inputs: ChannelStats | None, recipe: Recipe, whole: bool
) -> None:
    """Values for what was decided. A mask that was found together with the weights is now found
    together with the values; one that a criterion or a refinement made stays."""
    rounding, update = recipe.rounding, recipe.weight_update
    assert rounding is not None
    keep = None if whole else decision.keep
    if keep is not None and inputs is not None and update is not None and update.finds_mask:
        pattern = recipe.n_of_m
        keep, decision.values = rounding.find(weight, keep, decision.weight, inputs, pattern)
        decision.keep = keep
    else:
        decision.values = rounding(weight, keep, decision.weight, inputs)
    if recipe.reconstruction is not None:
        decision.unrounded = weight.clone() if decision.weight is None else decision.weight
    decision.weight = decision.values.dense(keep)


def _from_base(
    part: str, weight: Tensor, base: Tensor, inputs: ChannelStats | None, recipe: Recipe
) -> Decision:
    chosen, update, keep = recipe.refinement, recipe.weight_update, base
    if inputs is None:
        return Decision(keep)
    if chosen is not None and chosen.layers in ("all", part):
        keep = chosen(weight, base, inputs, recipe.n_of_m, recipe.method)
    return Decision(keep, None if update is None else update(weight, keep, inputs))


def _mask(score: Tensor, recipe: Recipe, removed: int | None, share: float) -> Tensor:
    if recipe.n_of_m is not None:
        return masks.keep_nested(score, recipe.n_of_m, share)
    if removed is None:
        rows, columns = score.shape
        removed = masks.count_removed_from(rows, columns, recipe.target_sparsity, recipe.group)
    if share < 1 and recipe.group == "row":  # whole rows on the way
        return masks.drop_lowest(score, int(share * removed) // len(score))
    return masks.keep_count(score, int(share * removed) if share < 1 else removed, recipe.group)


def score(
    name: str,
    weight: Tensor,
    inputs: ChannelStats | None,
    outputs: ChannelStats | None,
    recipe: Recipe,
    gradients: ChannelStats | None = None,
) -> Tensor:
    """What the recipe's criterion gives each weight of the matrix `name`."""
    rows, columns = weight.shape
    statistics: dict[str, Any] = {}
    if "input_norm" in recipe.criterion.needs:
        statistics["input_norm"] = inputs.norm if inputs else weight.new_ones(columns).float()
    if "output_norm" in recipe.criterion.needs:
        statistics["output_norm"] = outputs.norm if outputs else weight.new_ones(rows).float()
    if "regional_gradient" in recipe.criterion.needs:
        measured = torch.zeros_like(weight).float() if gradients is None else gradients.norm
        statistics["regional_gradient"] = measured.view(rows, columns)
    if "generator" in recipe.criterion.needs:
        statistics["generator"] = generator_for(recipe.seed, name)
    return recipe.criterion(weight, statistics, recipe.params)


def _figures(
    weight: Tensor,
    base: Tensor,
    decision: Decision,
    inputs: ChannelStats | None,
    held_out: ChannelStats | None,
) -> dict[str, float]:
    """Of the base mask and of what was decided: ||X(W~-W)||_F / ||XW||_F on the tokens that decided
    and on others, and the mean over rows of the expected error's size. Where values are on a grid,
    the base mask's weights are rounded to it, each by itself."""
    weight = weight.float()
    changed = [weight * base]
    if decision.values is not None:
        changed = [round_to_grid(weight, decision.values.grid, base).dense(base)]
    if decision.weight is not None or decision.keep is not base:
        changed.append(weight * decision.keep if decision.weight is None else decision.weight)
    asked: dict[str, list[Tensor]] = {}
    if inputs is not None:
        asked["relative"] = _sizes(weight, changed, inputs.gram)
        asked["expected"] = [((weight - each) @ inputs.mean).abs().mean() for each in changed]
        asked["exchanged"] = [masks.count_true((decision.keep & ~base).flatten())]
    if held_out is not None:
        asked["held out"] = _sizes(weight, changed, held_out.gram)
    answers = iter(host.bring([value for values in asked.values() for value in values]))
    found = {name: [next(answers) for _ in values] for name, values in asked.items()}
    figures: dict[str, float] = {}
    if inputs is not None:
        relative, expected = _relative(found["relative"]), found["expected"]
        figures |= {
            "relative_error_base": relative[0],
            "relative_error": relative[-1],
            "expected_error_before": expected[0],
            "expected_error_after": expected[-1],
            "exchanged": int(found["exchanged"][0]),
        }
    if held_out is not None:
        relative = _relative(found["held out"])
        figures |= {"held_out_error_base": relative[0], "held_out_error": relative[-1]}
    return figures


def _sizes(weight: Tensor, changed: list[Tensor], gram: Tensor) -> list[Tensor]:
    """||XW||_F^2, and ||X(W~-W)||_F^2 for each W~, from G = X^T X."""
    gram = gram.to(weight.device)
    sized = (weight, *(each - weight for each in changed))
    return [((each @ gram) * each).sum(dtype=torch.float64) for each in sized]


def _relative(sizes: list[float]) -> list[float]:
    """||X(W~-W)||_F / ||XW||_F"""
    whole, *lost = sizes
    return [(max(part, 0.0) / whole) ** 0.5 if whole > 0 else 0.0 for part in lost]


def check_finite(weights: Mapping[str, Tensor], *tables: Mapping[str, ChannelStats]) -> None:
    """Fail where a matrix's weights, or its statistics in one of the tables, are not all numbers.
    One look settles it for all matrices."""
    looked: set[int] = set()
    finite: list[Tensor] = []
    otherwise: list[str] = []
    for name, weight in weights.items():
        finite.append(host.finite(weight))
        otherwise.append(f"{name} has NaN or infinite weights.")
        for stats in (table[name] for table in tables if name in table):
            if id(stats) not in looked:
                flags = stats.finite()
                finite += flags
                otherwise += [f"{name} sees NaN or infinite activations."] * len(flags)
            looked.add(id(stats))
    for flag, sentence in zip(host.bring(finite), otherwise, strict=True):
        if not flag:
            raise SympruneError(sentence)


def generator_for(seed: int, name: str) -> torch.Generator:
    """A generator of its own for each matrix, so that no draw depends on the order of the work."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
