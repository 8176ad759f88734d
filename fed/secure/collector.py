"""The server's side of secure sums: passes letters on, adds up, and takes the masks off.

It holds no secret. Where clients are gone it gets the shares of their pair secrets, of those who
are there the shares of their own seeds; a share that is not what its dealer signed is attributed to
its holder, shares that make no secret to their dealer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.secure import graph, keys, letters, masking, shares
from symprune.fed.secure.party import Party, Slot, pair_secret
from symprune.fed.wire.payload import Expected

BYTE = torch.uint8
Fields = dict[str, Tensor]


@dataclass
class Mail:
    """What one client has dealt out for a sum: its public head, and a letter for each holder."""

    head: bytes
    letters: dict[int, bytes]


@dataclass
class Collector:
    """Everything the server knows of a run's secure sums. `index` is the sum that comes next."""

    cards: dict[int, bytes] = field(default_factory=dict)
    mails: dict[int, Mail] = field(default_factory=dict)
    coming: dict[int, Mail] = field(default_factory=dict)
    index: int = 0
    masked: dict[int, Fields] = field(default_factory=dict)
    agreements: dict[int, bytes] = field(default_factory=dict)

    @property
    def least(self) -> int:
        return graph.threshold(len(self.cards))

    def holders(self, number: int, among: Sequence[int]) -> list[int]:
        """Who gets a letter from a client."""
        near = graph.neighbours(self.cards)[number] | {number}
        return [holder for holder in sorted(among) if holder in near]

    def take_mail(self, number: int, head: Tensor, rows: Tensor, among: Sequence[int]) -> None:
        dealt = [bytes(row.tolist()) for row in rows]
        named = dict(zip(self.holders(number, among), dealt, strict=True))
        self.coming[number] = Mail(bytes(head.tolist()), named)

    def open_mail(self) -> None:
        """Those who wrote for the next sum take part in it."""
        self.mails, self.coming = self.coming, {}

    @property
    def participants(self) -> list[int]:
        return sorted(self.mails)

    def rows_for(self, number: int) -> Tensor:
        """Every participant's head, and its letter to this client if it wrote one."""
        return pack(
            [
                self.mails[sender].head
                + self.mails[sender].letters.get(number, bytes(letters.LETTER_BYTES))
                for sender in self.participants
            ],
            letters.ROW_BYTES,
        )

    def take_masked(self, got: Mapping[int, Mapping[str, Tensor]]) -> None:
        """The masked numbers of those who are in the sum; the agreements they signed."""
        self.agreements = {n: bytes(fields["agreed"].tolist()) for n, fields in got.items()}
        self.masked = {
            n: {name: value for name, value in fields.items() if name != "agreed"}
            for n, fields in got.items()
        }

    @property
    def survivors(self) -> list[int]:
        return sorted(self.masked)

    def unmask_request(self) -> Fields:
        signed = [self.agreements[number] for number in self.survivors]
        return {
            "survivors": torch.tensor(self.survivors),
            "agreements": pack(signed, keys.SIGNATURE_BYTES),
        }

    def check_shares(self, number: int, given: Tensor) -> dict[int, bytes]:
        """A holder's shares, by dealer; refused if one is not what the dealer signed."""
        found = {}
        for sender, row in zip(self.participants, given, strict=True):
            letter = self.mails[sender].letters.get(number)
            if letter is None:
                continue
            kind = letters.OWN if sender in self.masked else letters.PAIR
            share = bytes(row.tolist())
            if letters.commit(share) != letters.commitments(letter)[kind]:
                raise SympruneError(f"It gave a false share of client {sender}'s secret.")
            found[sender] = share
        return found

    def unmask(self, given: Mapping[int, Mapping[int, bytes]]) -> Fields:
        """The sum of the survivors' numbers, from shares by holder and dealer; then the next sum's
        turn comes."""
        summed = masking.total(self.masked[number] for number in self.survivors)
        near = graph.neighbours(self.cards)
        for sender in self.participants:
            secret = self._reconstruct(sender, given, graph.threshold(len(near[sender]) + 1))
            if sender in self.masked:
                summed = masking.shift(summed, secret, add=False)
                continue
            for other in sorted(near[sender] & self.masked.keys()):
                head = self.mails[other].head
                stream = pair_secret(secret, head, self.index, sender, other)
                summed = masking.shift(summed, stream, add=other > sender)
        self.index, self.masked = self.index + 1, {}
        self.open_mail()
        return summed

    def _reconstruct(
        self, sender: int, given: Mapping[int, Mapping[int, bytes]], least: int
    ) -> bytes:
        held = {holder: all_of[sender] for holder, all_of in given.items() if sender in all_of}
        if len(held) < least:
            raise SympruneError(
                f"Too few clients are left to go on: {len(held)} gave a share of client {sender}'s "
                f"secret, {least} are needed to take its masks off."
            )
        secret, head = shares.combine(held, least), self.mails[sender].head
        public, seed = head[: keys.KEY_BYTES], head[keys.KEY_BYTES :]
        if sender in self.masked:
            right = secret is not None and keys.digest(b"seed", secret) == seed
        else:
            right = secret is not None and keys.exchange_key(secret) == public
        if secret is None or not right:
            raise SympruneError(
                f"Client {sender} dealt out shares of something else than its secrets, so its "
                "masks cannot be taken off: start again without it."
            )
        return secret

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Between two sums, for a checkpoint: plain values, and tensors by name."""
        tensors = {f"card {n}": pack([card], keys.CARD_BYTES)[0] for n, card in self.cards.items()}
        for number, mail in self.mails.items():
            tensors[f"head {number}"] = pack([mail.head], letters.HEAD_BYTES)[0]
            tensors[f"mail {number}"] = pack(list(mail.letters.values()), letters.LETTER_BYTES)
        holders = {str(number): list(mail.letters) for number, mail in self.mails.items()}
        return {"index": self.index, "holders": holders}, tensors

    @classmethod
    def from_state(cls, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Collector:
        made = cls(index=int(plain["index"]))
        for name in (name for name in tensors if name.startswith("card ")):
            made.cards[int(name.removeprefix("card "))] = bytes(tensors[name].tolist())
        for number, holders in plain["holders"].items():
            dealt = zip(holders, unpack(tensors[f"mail {number}"]), strict=True)
            head = bytes(tensors[f"head {number}"].tolist())
            made.mails[int(number)] = Mail(head, dict(dealt))
        return made


def pack(rows: Sequence[bytes], width: int) -> Tensor:
    joined = bytearray(b"".join(rows))
    if not joined:
        return torch.zeros(0, width, dtype=BYTE)
    return torch.frombuffer(joined, dtype=BYTE).view(-1, width)


def unpack(rows: Tensor) -> list[bytes]:
    return [bytes(row.tolist()) for row in rows]


def mail_fields(holders: int) -> Expected:
    """What a client deals out, as a message."""
    return {
        "head_of_sum": (BYTE, (letters.HEAD_BYTES,)),
        "letters": (BYTE, (holders, letters.LETTER_BYTES)),
    }


def request_fields(participants: int) -> Expected:
    """Who takes part in a sum, and what they wrote to the client that is asked."""
    who = (torch.int64, (participants,))
    return {"participants": who, "letters": (BYTE, (participants, letters.ROW_BYTES))}


def asked_to_unmask(survivors: int) -> Expected:
    """Who is in a sum, and what they have signed about it."""
    signed = (BYTE, (survivors, keys.SIGNATURE_BYTES))
    return {"survivors": (torch.int64, (survivors,)), "agreements": signed}


def unmasked_fields(participants: int, holders: int) -> Expected:
    """A share of each participant's, and what is dealt out for the next sum."""
    given = (BYTE, (participants, shares.SHARE_BYTES))
    return {"shares": given, **mail_fields(holders)}


def mail(slot: Slot) -> Fields:
    """What a client has dealt out for a sum, for `take_mail`."""
    dealt = [slot.mail[holder] for holder in sorted(slot.mail)]
    head = pack([slot.secrets.head], letters.HEAD_BYTES)[0]
    return {"head_of_sum": head, "letters": pack(dealt, letters.LETTER_BYTES)}


def answer_unmask(party: Party, index: int, asked: Fields) -> Fields:
    """A client's shares of who is in a sum and who is not, and its letters for the next."""
    told = asked["survivors"].tolist()
    signed = dict(zip(told, unpack(asked["agreements"]), strict=True))
    given, slot = party.unmask(index, told, signed)
    assert party.now is not None
    rows = [given.get(sender, bytes(shares.SHARE_BYTES)) for sender in party.now.participants]
    return {"shares": pack(rows, shares.SHARE_BYTES), **mail(slot)}


def named(numbers: Tensor, rows: Tensor) -> dict[int, bytes]:
    """Rows by the numbers of their clients, each of whom is named once."""
    who = numbers.tolist()
    if len(set(who)) < len(who):
        raise SympruneError("A client of a secure sum is named twice.")
    return dict(zip(who, unpack(rows), strict=True))
