"""Which replies of pruning clients a server counts: what each says alone, and beside the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.pruning.aggregate import ballots, bounds, grams, totals
from symprune.fed.pruning.aggregate.ballots import STATISTICS
from symprune.fed.pruning.aggregate.packed_stats import Packed, Part
from symprune.fed.pruning.aggregate.totals import FALSE, Replies
from symprune.fed.pruning.messages import Known, Settings
from symprune.fed.robust import KRUM, NORM, Defence
from symprune.stats import ChannelStats

Members = Mapping[int, Known]


class Judge:
    """What a run's server compares replies with: a rule, what it has told the clients, and, of the
    block at hand, how they are laid out and what its own few tokens bring."""

    def __init__(self, defence: Defence, settings: Settings) -> None:
        self.defence, self.settings = defence, settings
        self.parts: Sequence[Part] = ()
        self.own: bounds.Lengths = []

    def begin(
        self,
        parts: Sequence[Part],
        inputs: Mapping[str, ChannelStats],
        outputs: Mapping[str, ChannelStats],
    ) -> None:
        """A block: its layout, and what the server has measured itself."""
        self.parts, self.own = parts, bounds.own_lengths(parts, inputs, outputs)

    def check(self, fields: Mapping[str, Tensor], known: Known) -> None:
        """Refuse one client's reply, in the clear, that no text can have."""
        if "scale" in fields and bool((fields["scale"] < 0).any()):
            raise SympruneError("It rounds by less than nothing.")
        if "counts" not in fields:
            return
        most = torch.tensor([known.samples, known.samples * known.length])
        if (fields["counts"] < 0).any() or (fields["counts"] > most).any():
            raise SympruneError("It counted more samples than it has.")
        packed = _packed(fields)
        if self.settings.noise:
            bounds.check_noised(packed, known.samples, self.settings.share)
            return
        if totals.negative_squares(self.parts, packed.values):
            raise SympruneError("It sent sums of squares below zero.")
        bounds.check_possible(self.parts, packed)

    def check_grams(self, fields: Mapping[str, Tensor], first: Mapping[str, Tensor], known: Known,
                    scale: Tensor) -> None:  # fmt: skip
        """Refuse Gram matrices, in the clear, that do not fit the client's own lengths. first is
        what it said before; scale is what all round by."""
        exact, count = self.settings.exact, math.sqrt(known.samples)
        packed = _packed(fields if exact else first)
        own = bounds.lengths_of(self.parts, packed, roots=True)
        squared = [length for part, length in zip(self.parts, own, strict=True) if part.gram]
        for number, shared in enumerate(grams.by_part(self.parts, scale)):
            half = self._half(fields, number, shared)
            length = squared[number]
            if length is None:
                length = bounds.diagonal_lengths(half, len(shared))
            unit = bounds.COARSE * count if exact else 2.0 ** -(self.settings.gram_bits / 2)
            bounds.check_gram(half, length + unit * shared)

    def odd(self, got: Replies, members: Members, dense: Sequence[Tensor]) -> dict[int, str]:
        """Clients to be left out, in the clear, each with a sentence."""
        first = next(iter(got.values()), {})
        compared = self.settings.aggregate != STATISTICS or "scale" in first or "counts" in first
        if self.defence.rule != NORM or self.settings.noise or not compared:
            return {}
        if self.settings.aggregate != STATISTICS and not self.settings.weights:
            return {}
        if self.settings.aggregate != STATISTICS:
            told = {n: ballots.read_plain(got[n], len(dense)).weights for n in got}
            return bounds.weights_too_large(told, dense)
        if "scale" in first:
            said = {
                number: bounds.scale_lengths(self.parts, fields["scale"], members[number].length)
                for number, fields in got.items()
            }
            return bounds.too_long(said, self.own, bounds.FIRST)
        return bounds.too_long(self._said(got), self.own, self.defence.value)

    def choose(self, block: int, got: Replies) -> tuple[Replies, list[str]]:
        """Whose statistics count in this block, by Krum; a sentence for each of the others."""
        if self.defence.rule != KRUM or not self.parts:
            return got, []
        kept = bounds.krum(self.defence, self._said(got))
        rule = f"{self.defence.rule}:{self.defence.value:g}"
        notes = [
            f"Client {number} does not count in block {block}, by {rule}."
            for number in sorted(set(got) - set(kept))
        ]
        return {number: got[number] for number in kept}, notes

    def check_sum(self, total: Packed, samples: int, clients: int) -> None:
        """Stop at a secure sum that no honest clients have; whose fault it is cannot be told."""
        try:
            if self.settings.noise:
                bounds.check_noised(total, samples, self.settings.share, clients)
                return
            bounds.check_possible(self.parts, total, clients * bounds.FIXED)
        except SympruneError:
            raise SympruneError(FALSE) from None
        if self.defence.rule == NORM:
            summed = {0: bounds.lengths_of(self.parts, total)}
            if bounds.too_long(summed, self.own, bounds.ALONE):
                raise SympruneError(FALSE)

    def check_ballot(self, total: ballots.Ballot, dense: Sequence[Tensor]) -> None:
        """Stop at a secure sum of weights that are far beyond the dense ones."""
        if self.defence.rule != NORM or not total.weights:
            return
        pairs = zip(total.weights, total.kept, strict=True)
        means = [weights / kept.clamp(min=1) for weights, kept in pairs]
        if bounds.weights_too_large({0: means}, dense):
            raise SympruneError(FALSE)

    def _said(self, got: Replies) -> dict[int, bounds.Lengths]:
        said = {}
        for number, fields in got.items():
            halves = []
            if self.settings.exact:
                count = sum(part.gram for part in self.parts)
                halves = [(fields[f"gram{n}"], fields[f"rest{n}"]) for n in range(count)]
            said[number] = bounds.lengths_of(self.parts, _packed(fields), halves)
        return said

    def _half(self, fields: Mapping[str, Tensor], number: int, shared: Tensor) -> grams.Half:
        entries = fields[f"gram{number}"]
        if self.settings.exact:
            return entries, fields[f"rest{number}"]
        how = (self.settings.gram_bits, self.settings.clients)
        return grams.in_units(entries, shared, *how), torch.zeros_like(entries)


def _packed(fields: Mapping[str, Tensor]) -> Packed:
    return Packed(fields["counts"], fields["values"], fields["rests"])
