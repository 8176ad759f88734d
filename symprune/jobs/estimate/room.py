"""How much memory and disk a run takes: formulas of sizes, and what was measured of temporaries."""

from __future__ import annotations

from dataclasses import dataclass

from symprune.engine import decide
from symprune.engine.predictions import size_of_predictions
from symprune.engine.reconstruct import COPIES, ROUNDED
from symprune.engine.text.self_written import AT_ONCE
from symprune.engine.text.tokens import tries
from symprune.gram import memory_of
from symprune.recipe import Recipe
from symprune.stats import DRIFT

MASKING, FITTING = 5, 14
"""fp32 copies of the largest matrix while it is masked, and while its weights are fitted or its
mask is refined: 4.6 and 14 were measured (docs/scale.md)."""
LOGITS = 3  # copies of a window's predictions, in fp32


@dataclass(frozen=True)
class Sizes:
    """Bytes of the largest block, of all blocks, of what is around them and of a window's hidden
    states, in the type they are computed in; weights of the largest matrix and of the largest
    block; widths of a block's distinct inputs; what the way back of a window keeps; the vocabulary
    and the tokens of a window; what is held before the first block, and the most so far."""

    block: int
    blocks: int
    around: int
    window: int
    largest: int
    weights: int
    widths: tuple[int, ...]
    way_back: int
    vocabulary: int
    seqlen: int
    held: int
    most: int


def count_memory(
    recipe: Recipe,
    sizes: Sizes,
    *,
    samples: int,
    held_out: int,
    at_once: int,
    report_error: bool = False,
    states_in_memory: bool = True,
    grams_in_memory: bool = True,
    writes: bool = False,
    cache: int = 0,
) -> int:
    """The most bytes the run will hold. samples and held_out are those of one process; writes: the
    whole model continues text; cache: of keys and values, where it writes text to calibrate on."""
    needs, trained = decide.needs(recipe, report_error), recipe.reconstruction
    watching = held_out if needs.gram or trained is not None else 0
    copies = int(recipe.follows_pruned) + int(recipe.follows_dense)
    if trained is not None:
        copies += (trained.inputs == "dense") + trained.by_parts
    states = (samples + watching) * sizes.window * copies * bool(needs or trained)
    states = states if states_in_memory else 0
    steps = (recipe.refinement, recipe.weight_update, recipe.rounding)
    temporaries = FITTING if any(steps) or needs.gram else MASKING
    grams = 0
    if needs.gram and grams_in_memory:
        grams = sum(memory_of(width, DRIFT in needs.inputs) for width in sizes.widths)
        grams *= 2 if watching else 1
    walk = sizes.block + states
    training = 0
    if trained is not None:
        each = COPIES + (ROUNDED if recipe.rounding is not None else 0)
        training = 4 * each * sizes.weights + sizes.way_back
    stages = [walk + grams + 4 * temporaries * sizes.largest, walk + training]
    if recipe.trains_predictions:
        learnt = size_of_predictions(sizes.seqlen, sizes.vocabulary)
        stages.append(walk + training + sizes.around + learnt)
    logits = LOGITS * 4 * sizes.seqlen * sizes.vocabulary
    if at_once:
        stages.append(sizes.around + at_once * sizes.window * states_in_memory + logits)
    for windows, count in tries(recipe):
        tried = (count + 1) * windows * sizes.window * states_in_memory
        stages += [walk + tried + count * 4 * sizes.largest, sizes.around + tried + logits]
    if writes:
        stages.append(sizes.blocks + sizes.around)
    if recipe.self_samples:
        stages.append(sizes.blocks + sizes.around + AT_ONCE * sizes.window * 2 + cache)
    return max(sizes.most, sizes.held + max(stages))
