"""Clients that prune alone, and a server that counts what they kept: the baselines.

Votes (FedPrLLM, Guo et al. 2025, layer by layer): every client sends its mask, one bit a weight,
and what most of them kept stays. Averages (FedSpaLLM, Bai et al. 2024): what stays is the mean over
the clients that kept it, and of weights with equally many votes the larger stay. Either way as many
weights stay as the recipe says. A client no token of which came by a matrix keeps nothing of it,
which is an abstention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from symprune import masks
from symprune.engine import decide
from symprune.engine.collect import Collector
from symprune.engine.visit.pruning import WalkPlan, reason_to_stay_dense
from symprune.errors import SympruneError
from symprune.maskset import MaskSet
from symprune.models.matrices import Matrix
from symprune.recipe import Recipe
from symprune.stats import ChannelStats, Needs

STATISTICS, VOTES, AVERAGE = AGGREGATES = ("statistics", "votes", "average")
UNSEEN = "no calibration token came by"
ROOM = 17  # binary digits by which an updated weight may be larger than the largest dense one
MOST_BALLOTS = 2**14  # whose sum has room beside these


@dataclass
class Ballot:
    """What one client decided alone, or the sum over clients: tokens by matrix and, by the number
    of the parameter, how many keep a weight and what they made of it."""

    tokens: Tensor
    kept: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def add(self, other: Ballot) -> None:
        self.tokens = self.tokens + other.tokens
        self.kept = [mine + more for mine, more in zip(self.kept, other.kept, strict=True)]
        pairs = zip(self.weights, other.weights, strict=True)
        self.weights = [mine + more for mine, more in pairs]


def cast(
    matrices: Sequence[Matrix], measured: Collector, recipe: Recipe, stored: torch.dtype | None
) -> Ballot:
    """What this client would keep, and its weights where the recipe updates them; the model stays
    as it is."""
    plan = WalkPlan(recipe, Needs())
    parameters = {matrix.parameter_name: matrix.parameter for matrix in matrices}
    kept = {
        name: torch.zeros(parameter.shape, dtype=torch.bool)
        for name, parameter in parameters.items()
    }
    weights = {}
    if recipe.weight_update is not None:
        weights = {n: torch.zeros(p.shape, dtype=stored or p.dtype) for n, p in parameters.items()}
    tokens = []
    for matrix in matrices:
        inputs, outputs = measured.inputs.get(matrix.name), measured.outputs.get(matrix.name)
        tokens.append((inputs or outputs or ChannelStats(0)).tokens)
        if reason_to_stay_dense(matrix, measured, plan):
            continue
        statistics = (inputs, outputs)
        found = decide.decide(matrix.name, matrix.part, matrix.weight, *statistics, recipe)
        matrix.slice_of(kept[matrix.parameter_name]).copy_(found.keep)
        if weights:
            weight = matrix.weight if found.weight is None else found.weight
            mine = weight.to(stored or weight.dtype) * found.keep
            matrix.slice_of(weights[matrix.parameter_name]).copy_(mine)
    return Ballot(torch.tensor(tokens), list(kept.values()), list(weights.values()))


def vote_type(clients: int) -> torch.dtype:
    """What the sum of so many votes fits in."""
    return torch.uint8 if clients < 2**8 else torch.int32


def plain_fields(ballot: Ballot) -> dict[str, Tensor]:
    """A client's ballot as a message: one bit a weight, and the weights that are kept."""
    fields = {"tokens": ballot.tokens}
    for number, keep in enumerate(ballot.kept):
        fields[f"mask{number}"] = keep
        if ballot.weights:
            fields[f"values{number}"] = ballot.weights[number][keep]
    return fields


def whole_fields(ballot: Ballot, dense: Sequence[Tensor], clients: int) -> dict[str, Tensor]:
    """The same as whole numbers, which can be masked and added up."""
    fields = {"tokens": ballot.tokens}
    for number, keep in enumerate(ballot.kept):
        fields[f"mask{number}"] = keep.to(vote_type(clients))
        if ballot.weights:
            fields[f"values{number}"] = to_whole(ballot.weights[number], dense[number], clients)
    return fields


def read_plain(fields: Mapping[str, Tensor], parameters: int) -> Ballot:
    """A client's ballot from its message, as a sum of one."""
    ballot = Ballot(fields["tokens"])
    for number in range(parameters):
        keep = fields[f"mask{number}"]
        ballot.kept.append(keep.to(torch.int64))
        if f"values{number}" in fields:
            weights = torch.zeros(keep.shape, dtype=torch.float64)
            weights[keep] = fields[f"values{number}"].double()
            ballot.weights.append(weights)
    return ballot


def read_whole(fields: Mapping[str, Tensor], dense: Sequence[Tensor]) -> Ballot:
    """The sum of all ballots from the sum of their messages."""
    ballot = Ballot(fields["tokens"])
    for number, parameter in enumerate(dense):
        ballot.kept.append(fields[f"mask{number}"].to(torch.int64))
        if f"values{number}" in fields:
            ballot.weights.append(from_whole(fields[f"values{number}"], parameter))
    return ballot


def to_whole(weights: Tensor, dense: Tensor, clients: int) -> Tensor:
    """Weights as whole numbers that can be masked, in units of the dense ones' size."""
    whole = (weights.double() / _unit(dense)).round()
    if clients > MOST_BALLOTS or not bool((whole.abs() < 2.0**62 / clients).all()):
        raise SympruneError("An updated weight is too large for masked summation.")
    return whole.to(torch.int64)


def from_whole(whole: Tensor, dense: Tensor) -> Tensor:
    return whole.double() * _unit(dense)


def _unit(dense: Tensor) -> float:
    """A power of two, about 2^-45 of the largest dense weight."""
    largest = dense.detach().abs().max().double().cpu()
    exponent = int(torch.frexp(largest).exponent)
    return 2.0 ** (exponent - (62 - ROOM))


def check_count(matrices: Sequence[Matrix], kept: Sequence[Tensor], recipe: Recipe) -> None:
    """Refuse a client's mask that keeps more or fewer weights of a matrix than the recipe says."""
    whole = _by_name(matrices, kept)
    plain = recipe.with_changes(update=None)  # what becomes of a matrix without inputs
    for matrix in matrices:
        mask = matrix.slice_of(whole[matrix.parameter_name])
        stays, (rows, columns) = int(mask.sum()), mask.shape
        may_go = {count_removed(rows, columns, way) for way in (recipe, plain)}
        if stays not in {0, *(rows * columns - removed for removed in may_go)}:
            raise SympruneError(f"It keeps {stays} weights of {matrix.name}.")


def count_removed(rows: int, columns: int, recipe: Recipe) -> int:
    """How many weights go from a matrix."""
    if recipe.n_of_m is not None:
        return rows * (columns // recipe.n_of_m.m) * (recipe.n_of_m.m - recipe.n_of_m.n)
    share, runs = recipe.target_sparsity, _runs(columns, recipe)
    return sum(
        masks.count_removed_from(rows, run.stop - run.start, share, group) for run, group in runs
    )


def _runs(columns: int, recipe: Recipe) -> list[tuple[slice, str]]:
    """The columns whose weights compete, and whether by row: SparseGPT selects block by block."""
    update = dict(recipe.update) if isinstance(recipe.update, Mapping) else {}
    width = int(update.get("block", 0)) if update.get("select") else 0
    if not width or recipe.n_of_m is not None:
        return [(slice(0, columns), recipe.group)]
    starts = range(0, columns, width)
    return [(slice(start, min(start + width, columns)), "layer") for start in starts]


@dataclass
class Elected:
    """The masks by parameter, the new weights by matrix where there are any, who was not seen."""

    masks: MaskSet = field(default_factory=MaskSet)
    weights: dict[str, Tensor] = field(default_factory=dict)
    unseen: set[str] = field(default_factory=set)


def count(matrices: Sequence[Matrix], total: Ballot, recipe: Recipe, aggregate: str) -> Elected:
    """What most clients kept, exactly as many weights as the recipe says."""
    elected, votes = Elected(), _by_name(matrices, total.kept)
    share = recipe.target_sparsity
    sums = _by_name(matrices, total.weights) if total.weights else {}
    stays = {name: torch.ones(kept.shape, dtype=torch.bool) for name, kept in votes.items()}
    for matrix in matrices:
        name, device = matrix.parameter_name, matrix.parameter.device
        kept = matrix.slice_of(votes[name]).to(device).double()
        if not bool(kept.any()):
            elected.unseen.add(matrix.name)
            continue
        mean = matrix.weight.double()
        if sums:
            mean = matrix.slice_of(sums[name]).to(device) / kept.clamp(min=1)
            elected.weights[matrix.name] = mean
        score = kept
        if aggregate == AVERAGE:  # below one vote, so that the size only breaks ties
            score = kept + mean.abs() / (2 * mean.abs().max()).clamp(min=1e-300)
        stay = matrix.slice_of(stays[name])
        for run, group in _runs(score.shape[1], recipe):
            keep = masks.keep_mask(score[:, run], share, group=group, pattern=recipe.n_of_m)
            stay[:, run] = keep.cpu()
    for name, keep in stays.items():
        elected.masks[name] = keep
    return elected


def _by_name(matrices: Sequence[Matrix], tensors: Sequence[Tensor]) -> Mapping[str, Tensor]:
    names = dict.fromkeys(matrix.parameter_name for matrix in matrices)
    return dict(zip(names, tensors, strict=True))
