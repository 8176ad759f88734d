"""What federated pruning does not do, each in a sentence, before any work."""

from __future__ import annotations

from symprune.engine import decide
from symprune.errors import SympruneError
from symprune.fed.owner.guard import Guard
from symprune.fed.pruning.aggregate import grams
from symprune.fed.pruning.aggregate.ballots import AGGREGATES, STATISTICS, VOTES
from symprune.fed.pruning.messages import Settings
from symprune.fed.pruning.noise import Privacy
from symprune.fed.robust import NONE, NORM, read_defence
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
    if recipe.experts is not None:
        raise SympruneError(
            "--experts drops experts by what text in one place says, federated pruning has none; "
            "leave it out."
        )
    if recipe.permuted_parts:
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


def check_defence(
    robust: str, recipe: Recipe, aggregate: str, secure: bool, privacy: Privacy | None
) -> None:
    """Refuse a rule against hostile clients that cannot be followed."""
    rule = read_defence(robust).rule
    if rule in (NONE, NORM):
        return
    hidden = "--secure-sum" if secure else "--epsilon" if privacy is not None else None
    if hidden is not None:
        raise SympruneError(
            f"--robust {robust} compares what clients send, which {hidden} hides; leave it out."
        )
    if aggregate != STATISTICS or decide.needs(recipe).gram:
        raise SympruneError(
            f"--robust {robust} is for sums per channel, not for votes, averages or the Gram "
            "matrices of swap and --update; use norm:K."
        )


def check_asked(guard: Guard, settings: Settings, samples: int) -> None:
    """Refuse what the policy of a client's owner does not allow."""
    guard.pruning(settings.aggregate, settings.clients, samples)
    if settings.needs:
        noise = settings.noise if _noised(settings) else 0.0
        guard.sums(settings.secure, noise, settings.clip, settings.honest > 1)


def check_insisted(settings: Settings, secure: bool, gram: bool, least_noise: float) -> None:
    """Refuse less protection than a client's own settings ask for."""
    number = settings.number
    if secure and not settings.secure:
        raise SympruneError(f"Client {number} insists on masked summation.")
    if settings.sends_grams and not gram:
        raise SympruneError(f"Client {number} sends no Gram matrices: its owner has not set gram.")
    if settings.weights and settings.aggregate == STATISTICS and not settings.sends_grams:
        raise SympruneError(
            f"Client {number} takes no weights from a server that asks for no Gram matrices: what "
            "it measured behind weights of the server's own choice would tell more of its text."
        )
    if settings.noise < least_noise:
        raise SympruneError(f"Client {number} insists on more noise than it was told.")
    if least_noise and not _noised(settings):
        raise SympruneError(
            f"Client {number} insists on noise, which neither ballots nor Gram matrices are given."
        )


def _noised(settings: Settings) -> bool:
    """Whether noise, if there is any, is on all that is sent."""
    return settings.aggregate == STATISTICS and not settings.sends_grams


def check_once(settings: Settings, summed: bool, noised: bool) -> None:
    """Refuse to start over what was begun, where that would undo its protection."""
    if summed:
        raise SympruneError(
            f"Client {settings.number} was asked to start over: out of two secure sums of one "
            "text the statistics of whoever is in one of them alone would fall out."
        )
    if noised:
        raise SympruneError(
            f"Client {settings.number} was asked to start over, which would spend its "
            "privacy twice."
        )
