"""What federated pruning does not do, each in a sentence, before any work."""

from __future__ import annotations

from symprune.engine import decide
from symprune.errors import SympruneError
from symprune.fed.pruning.aggregate import grams
from symprune.fed.pruning.aggregate.ballots import AGGREGATES, STATISTICS, VOTES
from symprune.fed.pruning.noise import Privacy
from symprune.recipe import Recipe
from symprune.validation import check_choice


def check_recipe(
    recipe: Recipe,
    aggregate: str = STATISTICS,
    privacy: Privacy | None = None,
    gram_bits: int = grams.EXACT,
) -> None:
    """Refuse what a server cannot decide from what clients send, and what noise would not hide."""
    check_choice("aggregate", aggregate, AGGREGATES)
    grams.check_bits(gram_bits)
    if "regional_gradient" in recipe.criterion.needs:
        raise SympruneError(
            f"Method {recipe.method} needs a gradient for every weight, of which federated pruning "
            "sends none; choose another method."
        )
    if recipe.rounding is not None or recipe.head_grid is not None:
        option = "--values" if recipe.rounding is not None else "--values-head"
        raise SympruneError(
            f"{option} is not decided federatedly; prune without it, then put the values on a grid "
            "by symprune refine --masks FOLDER --refine none."
        )
    if recipe.self_samples is not None:
        raise SympruneError(
            "--self-samples adds text of the model's own, federated pruning takes the clients' "
            "alone; leave it out."
        )
    if recipe.permute is not None:
        raise SympruneError(
            "--permute takes an order from text in one place, federated pruning has none; leave it "
            "out."
        )
    if recipe.reconstruction is not None:
        raise SympruneError(
            "--reconstruct trains on what passes a block, which clients do not send; prune without "
            "it, then train the weights by symprune refine --masks FOLDER --refine none "
            "--reconstruct."
        )
    if recipe.by_groups:
        raise SympruneError(
            "--sequential and --targets measure a block several times; clients of federated "
            "pruning send its statistics at once, so leave them out."
        )
    if recipe.inputs != "pruned":
        raise SympruneError(
            "--inputs dense measures the dense model; clients of federated pruning measure behind "
            "the pruned blocks, so leave it out."
        )
    if recipe.allocation is not None:
        raise SympruneError(
            f"--allocate {recipe.allocation.name} is not for federated pruning, which takes the "
            "same share from every layer; leave it out."
        )
    if aggregate == VOTES and recipe.weight_update is not None:
        raise SympruneError(
            f"--update {recipe.weight_update.name} changes weights, which votes do not settle; "
            "aggregate statistics or averages."
        )
    needs = decide.needs(recipe)
    if gram_bits != grams.EXACT and (aggregate != STATISTICS or not needs.gram):
        raise SympruneError(
            "--gram-bits goes with --refine swap or --update, from the clients' statistics."
        )
    if privacy is None:
        return
    if aggregate != STATISTICS:
        raise SympruneError(
            f"--epsilon protects sums of statistics; with --aggregate {aggregate} clients send "
            "what they kept, which the noise does not hide."
        )
    if needs.gram:
        step = recipe.refinement if recipe.weight_update is None else recipe.weight_update
        name = "step" if step is None else step.name
        raise SympruneError(
            f"--epsilon does not go with {name}, which needs Gram matrices: noise that hides a "
            "window in so many numbers would leave nothing of them; use dsnot or r2-dsnot."
        )
