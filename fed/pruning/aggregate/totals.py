"""The clients' replies to one request, added up: plain, or behind masks that cancel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.pruning.aggregate import ballots, grams, packed_stats
from symprune.fed.pruning.aggregate.packed_stats import Packed, Part
from symprune.fed.pruning.messages import Settings
from symprune.fed.robust import Defence
from symprune.fed.secure import masking
from symprune.stats import TOTAL

Replies = Mapping[int, Mapping[str, Tensor]]
"""The fields of every client's reply, by its number; of a secure sum, what it came to alone."""
FALSE = (
    "The clients' secure sum is not one: somebody sent something else, and since only the sum is "
    "known, who it was cannot be told."
)


def statistics(
    parts: Sequence[Part], got: Replies, settings: Settings, samples: int, tokens: int
) -> Packed:
    """Sums per channel; samples and tokens are what all clients have."""
    if settings.secure:
        return _behind_masks(parts, got, torch.tensor([samples, tokens]), bool(settings.noise))
    total = packed_stats.empty(parts)
    for number in sorted(got):
        reply = got[number]
        total.add(Packed(reply["counts"], reply["values"], reply["rests"]))
    return total


def robust_statistics(parts: Sequence[Part], got: Replies, defence: Defence) -> Packed:
    """Sums as if every token of every client were one of a trimmed mean's or a geometric median's
    over clients."""
    total, at = packed_stats.empty(parts), 0
    replies = [got[number] for number in sorted(got)]
    for number, part in enumerate(parts):
        here = slice(at, at + part.size)
        at += part.size
        there = [reply for reply in replies if int(reply["counts"][number, 1])]
        if not there or not part.size:
            continue
        total.counts[number] = torch.stack([r["counts"][number] for r in there]).sum(0)
        means = [
            (r["values"][here] + r["rests"][here]) / int(r["counts"][number, 1]) for r in there
        ]
        middle = defence.middle(torch.stack(means))
        total.values[here] = middle * int(total.counts[number, 1])
    return total


def _behind_masks(parts: Sequence[Part], got: Replies, most: Tensor, noised: bool) -> Packed:
    values, rests = masking.from_fixed(masking.total(got.values())[masking.WIDE])
    counted = 2 * len(parts)
    counts = values[:counted].to(torch.int64).view(-1, 2)
    negative = not noised and negative_squares(parts, values[counted:])
    if negative or (counts < 0).any() or (counts > most).any():
        raise SympruneError(FALSE)
    return Packed(counts, values[counted:], rests[counted:])


def negative_squares(parts: Sequence[Part], values: Tensor) -> bool:
    """Whether a sum of squares is below zero."""
    names = [name for part in parts for name in part.sums]
    widths = [part.channels for part in parts for _ in part.sums]
    pieces = zip(names, values.split(widths), strict=True)
    return any(bool((piece < 0).any()) for name, piece in pieces if name != TOTAL)


def gram_matrices(
    parts: Sequence[Part], got: Replies, settings: Settings, scale: Tensor
) -> list[Tensor]:
    """Half of every input's Gram matrix, fp64."""
    summed, members = [], sorted(got)
    for number, lengths in enumerate(grams.by_part(parts, scale)):
        name = f"gram{number}"
        if settings.exact:
            summed.append(grams.total((got[n][name], got[n][f"rest{number}"]) for n in members))
            continue
        whole = masking.total({name: got[n][name]} for n in members)
        summed.append(grams.from_units(whole[name], lengths, settings.gram_bits, settings.clients))
    return summed


def ballot(
    got: Replies, dense: Sequence[Tensor], secure: bool, clients: int, tokens: int
) -> ballots.Ballot:
    """All clients' ballots; dense are the parameters they are about."""
    members = sorted(got)
    if secure:
        total = ballots.read_whole(masking.total(got.values()), dense)
    else:
        total = ballots.read_plain(got[members[0]], len(dense))
        for number in members[1:]:
            total.add(ballots.read_plain(got[number], len(dense)))
    odd = any(bool(((kept < 0) | (kept > clients)).any()) for kept in total.kept)
    if odd or bool(((total.tokens < 0) | (total.tokens > tokens)).any()):
        raise SympruneError(FALSE)
    return total
