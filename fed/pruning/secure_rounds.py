"""The messages of secure sums in federated pruning: a client's answers, and the server's rounds.

A sum takes two exchanges: masked numbers, then shares that take the masks off; with the latter
clients deal out shares for the next sum, so only the first one needs an exchange for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.pruning import messages
from symprune.fed.pruning.messages import SHARE, UNMASK, Settings
from symprune.fed.pruning.noise import check_sharing
from symprune.fed.secure import collector, keys
from symprune.fed.secure.collector import Collector, pack
from symprune.fed.secure.party import Party, Trust


def answer_share(data: bytes, party: Party, trust: Trust, settings: Settings) -> bytes:
    """A client's shares for the first sum."""
    clients = messages.read_head(data)[2]
    _check_count(clients, settings.clients)
    check_sharing(settings.honest, clients)
    _, fields = messages.read(data, SHARE, messages.share_request(clients))
    slot = party.share(collector.named(fields["roster"], fields["cards"]), trust)
    return messages.write(messages.head(SHARE), collector.mail(slot))


def answer_unmask(data: bytes, party: Party, most: int) -> bytes:
    """A client's shares of who is in a sum and who is not, and its letters for the next."""
    index, survivors = messages.read_head(data)[2:4]
    _check_count(survivors, most)
    _, fields = messages.read(data, UNMASK, collector.asked_to_unmask(survivors))
    reply = collector.answer_unmask(party, index, fields)
    return messages.write(messages.head(UNMASK, index), reply)


def mask(
    party: Party, index: int, fields: Mapping[str, Tensor], purpose: str,
    numbers: Mapping[str, Tensor], what: bytes,
) -> dict[str, Tensor]:  # fmt: skip
    """A client's numbers behind its masks, as the request's fields say who takes part."""
    rows = collector.named(fields["participants"], fields["letters"])
    masked, signature = party.mask(index, rows, purpose, what, numbers)
    return {**masked, "agreed": pack([signature], keys.SIGNATURE_BYTES)[0]}


def _check_count(clients: int, most: int) -> None:
    if not 0 < clients <= most:
        raise SympruneError(f"A client was asked for a sum of {clients} clients of {most}.")


class SecureRounds:
    """The server's rounds: which exchange comes next, and what came of the last."""

    def __init__(self) -> None:
        keys.need_cryptography()
        self.sums = Collector()
        self.cards: dict[int, bytes] = {}
        self._given: dict[int, dict[int, bytes]] = {}

    def begin(self, members: Iterable[int], honest: int) -> None:
        """The clients that were taken in are those of the sums; so many share the noise."""
        self.sums.cards = {number: self.cards[number] for number in members}
        check_sharing(honest, len(self.sums.cards))

    @property
    def sharing(self) -> bool:
        """Whether shares for the first sum are to be dealt out."""
        return not self.sums.mails and not self.sums.masked

    @property
    def unmasking(self) -> bool:
        """Whether the masks of a sum are to be taken off."""
        return bool(self.sums.masked)

    def ask_shares(self) -> bytes:
        roster = sorted(self.sums.cards)
        cards = pack([self.sums.cards[number] for number in roster], keys.CARD_BYTES)
        asked = {"roster": torch.tensor(roster), "cards": cards}
        return messages.write(messages.head(SHARE, len(roster)), asked)

    def take_shares(self, number: int, data: bytes) -> None:
        among = sorted(self.sums.cards)
        expected = collector.mail_fields(len(self.sums.holders(number, among)))
        _, fields = messages.read(data, SHARE, expected)
        self.sums.take_mail(number, fields["head_of_sum"], fields["letters"], among)

    def ask_masked(self, number: int) -> dict[str, Tensor]:
        who = torch.tensor(self.sums.participants)
        return {"participants": who, "letters": self.sums.rows_for(number)}

    def ask_unmask(self) -> bytes:
        head = messages.head(UNMASK, self.sums.index, len(self.sums.survivors))
        return messages.write(head, self.sums.unmask_request())

    def take_unmask(self, number: int, data: bytes) -> None:
        among, sums = self.sums.survivors, self.sums
        held = len(sums.holders(number, among))
        expected = collector.unmasked_fields(len(sums.participants), held)
        numbers, fields = messages.read(data, UNMASK, expected)
        if numbers[0] != sums.index:
            raise SympruneError(f"It unmasked sum {numbers[0]}, not {sums.index}.")
        self._given[number] = sums.check_shares(number, fields["shares"])
        sums.take_mail(number, fields["head_of_sum"], fields["letters"], among)

    def finish(self) -> dict[str, Tensor]:
        """The sum."""
        given, self._given = self._given, {}
        return self.sums.unmask(given)


def check_same(before: Sequence[int], now: Sequence[int]) -> None:
    """Refuse a block's Gram matrices from fewer clients than its sums: the difference would be the
    squares of those who are missing."""
    missing = sorted(set(before) - set(now))
    if missing:
        raise SympruneError(
            f"Client {missing[0]} is gone between a block's sums and its Gram matrices, which "
            "together would tell the server its own: start the server again once it is back."
        )
