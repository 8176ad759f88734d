"""What clients' statistics cannot be, and what no honest ones are: bounds that a server checks.

Some lies are impossible whatever the text is: a mean is no larger than its root mean square, an
entry of a Gram matrix than the lengths of its two channels, a clipped sum with noise than clip and
noise. Others are only absurd: a channel that is K times as long, per token, as the median client's
(`norm:K`, of three clients or more), or a thousand times as long as the server's own few tokens
bring, where there is no median to ask. A lie within these bounds counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.mechanism import UNITS, deviation
from symprune.fed.pruning.aggregate import grams
from symprune.fed.pruning.aggregate.packed_stats import Packed, Part
from symprune.fed.robust import NORM, Defence
from symprune.stats import SQUARE, TOTAL, ChannelStats

DEPLOYED = f"{NORM}:100"  # beyond honest clients, scripts/fed/honest_lengths.py
ALONE = 1000.0  # times as long as what the server's own tokens bring: for sums and for two clients
WEIGHTS = 20.0  # times as large as the largest dense one
CLAIMED = 100.0  # times as many samples as the median client has
FIRST = 300.0  # times as long, of a client's first sample: an expert may see one token of it or all
ROUNDED = 1e-2  # of a bound, beyond what sums in single precision are off by
REST = 2.0**-20  # of a sum, far more than the rest of its rounding
FIXED = 2.0**-60  # what a sum of squares behind masks may be off by
COARSE = 2.0**-13  # of a first sample's length: what a Gram matrix leaves of a shorter channel
DEVIATIONS = 12  # no noise is so far out
Lengths = list[Tensor | None]
"""For every part the root mean square of a channel over tokens; None where no token came by."""


def check_possible(parts: Sequence[Part], packed: Packed, blur: float = 0.0) -> None:
    """Refuse sums that no tokens have, of one client or of all, whose squares are off by the blur
    at most."""
    at = 0
    for part, (samples, tokens) in zip(parts, packed.counts.tolist(), strict=True):
        sums, rests = (v[at : at + part.size].view(-1, part.channels) for v in
                       (packed.values, packed.rests))  # fmt: skip
        at += part.size
        if not part.sums:
            continue
        named = dict(zip(part.sums, sums, strict=True))
        square = named[SQUARE].clamp(min=0) + blur
        most = {name: (tokens * square).sqrt() if name == TOTAL else square for name in named}
        for name, rest in zip(part.sums, rests, strict=True):
            slack = most[name] + torch.finfo(torch.float32).tiny
            if bool((named[name].abs() > slack * (1 + ROUNDED)).any()):
                raise SympruneError("It sent means that its sums of squares rule out.")
            if bool((rest.abs() > slack * REST).any()):
                raise SympruneError("It sent rests of roundings that are none.")
        if not (samples and tokens) and bool(sums.any()):
            raise SympruneError("It sent sums of no tokens.")


def check_noised(packed: Packed, samples: int, share: float, clients: int = 1) -> None:
    """Refuse what clipped samples and so many clients' shares of the noise do not add up to."""
    sigma = deviation(share) * math.sqrt(clients)
    longest = samples * UNITS + sigma * (math.sqrt(packed.values.numel()) + DEVIATIONS)
    if bool(packed.rests.any()) or not float(packed.values.norm()) <= longest:
        raise SympruneError("It sent more than clipped samples and their noise add up to.")


def check_gram(half: grams.Half, lengths: Tensor) -> None:
    """Refuse a Gram matrix with entries larger than the lengths of the client's channels allow."""
    entry, rest = half[0].double(), half[1].double()
    most = grams.products(lengths) * (1 + ROUNDED)
    if bool(((entry + rest).abs() > most).any()) or bool((rest.abs() > most * REST).any()):
        raise SympruneError("It sent a Gram matrix that is none.")


def diagonal_lengths(half: grams.Half, channels: int) -> Tensor:
    """The lengths of all channels by their Gram matrix."""
    row = torch.arange(channels, 0, -1)
    where = row.cumsum(0) - row
    return (half[0][where].double() + half[1][where].double()).clamp(min=0).sqrt()


def lengths_of(
    parts: Sequence[Part], packed: Packed, halves: Sequence[grams.Half] = (), roots: bool = False
) -> Lengths:
    """How long the channels of each part are, by its sums of squares or its Gram matrix; with
    roots, of all tokens together."""
    found: Lengths = []
    at, gram = 0, 0
    for part, (_, tokens) in zip(parts, packed.counts.tolist(), strict=True):
        half = halves[gram] if part.gram and gram < len(halves) else None
        gram += part.gram
        length: Tensor | None = None
        if SQUARE in part.sums:
            here = slice(at, at + part.channels)  # the squares come first
            length = (packed.values[here] + packed.rests[here]).clamp(min=0).sqrt()
        elif half is not None:
            length = diagonal_lengths(half, part.channels)
        at += part.size
        if length is not None and not roots:
            length = length / math.sqrt(tokens) if tokens else None
        found.append(length)
    return found


def own_lengths(
    parts: Sequence[Part], inputs: Mapping[str, ChannelStats], outputs: Mapping[str, ChannelStats]
) -> Lengths:
    """The same of what the server itself has measured."""
    found: Lengths = []
    for part in parts:
        stats = (inputs if part.side == "inputs" else outputs).get(part.names[0])
        known = stats is not None and stats.tokens and SQUARE in stats.sums
        square = stats.sums[SQUARE] + stats.rests[SQUARE] if known and stats else None
        found.append(None if square is None or stats is None else
                     (square.cpu() / stats.tokens).clamp(min=0).sqrt())  # fmt: skip
    return found


def scale_lengths(parts: Sequence[Part], scale: Tensor, tokens: int) -> Lengths:
    """The same by what a first sample of so many tokens is rounded by."""
    each = iter(grams.by_part(parts, scale))
    own = [next(each) / math.sqrt(tokens) if part.gram else None for part in parts]
    return [None if length is None or not bool(length.any()) else length for length in own]


def too_long(said: Mapping[int, Lengths], own: Lengths, most: float) -> dict[int, str]:
    """Clients whose channels are absurdly long beside the others', `most` times or, beside the
    server's own, `ALONE` times; with a sentence each."""
    found: dict[int, str] = {}
    for part, mine in enumerate(own):
        there = {n: length for n, parts in said.items() if (length := parts[part]) is not None}
        if not there:
            continue
        rows = torch.stack(list(there.values()))
        usual, times = rows.median(0).values, most
        size = float(rows.square().mean(1).sqrt().median())
        if len(rows) < 3 or not size > 0:  # of two that differ, nobody can say which is odd
            if mine is None or not bool(mine.any()):
                continue
            usual, times, size = mine, ALONE, float(mine.square().mean().sqrt())
        for number, said_to_be in zip(there, times_usual(rows, usual, size), strict=True):
            if said_to_be > times:
                found[number] = f"What it measured is more than {times:g} times as large as usual."
    return found


def times_usual(rows: Tensor, usual: Tensor, size: float) -> Tensor:
    """For every client how many times as long as usual its longest channel is, or all together if
    that is more. A quiet channel is measured by the size of all."""
    alone = (rows / usual.clamp(min=size)).amax(1)
    return torch.maximum(alone, rows.square().mean(1).sqrt() / size)


def claims_too_many(samples: Mapping[int, int]) -> list[int]:
    """Clients that claim absurdly many samples beside the others, of three or more: what a client
    says counts by how much text it has."""
    if len(samples) < 3:
        return []
    usual = sorted(samples.values())[(len(samples) - 1) // 2]
    return [number for number, count in samples.items() if count > CLAIMED * usual]


def krum(defence: Defence, said: Mapping[int, Lengths]) -> list[int]:
    """Whose statistics count by Krum."""
    parts = list(zip(*said.values(), strict=True))
    rows: dict[str, Tensor | list[Tensor]] = {}
    for number, lengths in enumerate(parts):
        known = [length for length in lengths if length is not None]
        if known:
            nothing = torch.zeros_like(known[0])
            stacked = [nothing if length is None else length for length in lengths]
            rows[str(number)] = torch.stack(stacked)
    kept = defence.keeps(rows).tolist()
    return [number for number, keep in zip(said, kept, strict=True) if keep]


def weights_too_large(
    weights: Mapping[int, Sequence[Tensor]], dense: Sequence[Tensor]
) -> dict[int, str]:
    """Clients one of whose updated weights is absurdly large beside the dense ones."""
    limits = [WEIGHTS * float(parameter.detach().abs().max()) for parameter in dense]
    return {
        number: f"It made a weight more than {WEIGHTS:g} times as large as the largest dense one."
        for number, own in weights.items()
        if any(
            bool((w.abs() > limit).any()) for w, limit in zip(own, limits, strict=True) if len(w)
        )
    }
