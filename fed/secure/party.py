"""A client's side of secure sums: a state between messages, and four answers.

For each sum it deals out shares of new secrets, masks its numbers once, and then gives away either
a client's pair secret or its own seed, never both and never for two stories about who was there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.secure import graph, keys, letters, masking
from symprune.fed.secure.letters import HEAD_BYTES, Secrets


@dataclass(frozen=True)
class Trust:
    """What the owner has set: the key that vouches for this client, the node keys of all owners if
    they are known, of whom two thirds must then be there, and the fewest clients a sum must have.
    """

    node_key: Path | None = None
    peers: Path | None = None
    least_clients: int = 2


@dataclass
class Slot:
    """One sum: what was dealt out for it, what came, and what has been said about it."""

    index: int
    secrets: Secrets
    holders: list[int]
    mail: dict[int, bytes]
    kept: bytes
    participants: list[int] = field(default_factory=list)
    heads: dict[int, bytes] = field(default_factory=dict)
    held: dict[int, bytes] = field(default_factory=dict)
    agreed: bytes = b""
    masked: bytes = b""
    survivors: list[int] = field(default_factory=list)


@dataclass
class Party:
    """What a client remembers of its sums, all of them in one run."""

    number: int
    signing: bytes
    reading: bytes
    card: bytes
    least_clients: int = 2
    roster: dict[int, bytes] = field(default_factory=dict)
    now: Slot | None = None
    next: Slot | None = None
    purposes: dict[str, int] = field(default_factory=dict)

    @classmethod
    def enter(cls, number: int, trust: Trust) -> Party:
        keys.need_cryptography()
        signing, reading = keys.new_secret(), keys.new_secret()
        card = keys.make_card(signing, reading, trust.node_key).pack()
        return cls(number, signing, reading, card, max(2, trust.least_clients))

    def share(self, roster: Mapping[int, bytes], trust: Trust) -> Slot:
        """Take in who takes part in the run, and deal out shares for the first sum."""
        if self.roster:
            if dict(roster) != self.roster:
                raise SympruneError(f"Client {self.number} was told of other clients than before.")
            return self._slot(0)
        if roster.get(self.number) != self.card:
            raise SympruneError(f"Client {self.number} was left out of its own sum.")
        known = None if trust.peers is None else keys.read_peers(trust.peers)
        if known is not None:
            self.least_clients = max(self.least_clients, graph.threshold(len(known)))
        if len(roster) < self.least_clients:
            raise SympruneError(
                f"Client {self.number} was asked for a sum of {len(roster)} clients: its owner "
                f"insists on {self.least_clients}."
            )
        self._check_cards(roster, known)
        self.roster = dict(roster)
        self.next = self._deal(0, sorted(roster))
        return self.next

    def _check_cards(self, roster: Mapping[int, bytes], known: frozenset[bytes] | None) -> None:
        cards = {number: keys.Card.unpack(card) for number, card in roster.items()}
        if len({card.signs for card in cards.values()}) < len(cards):
            raise SympruneError("Two clients of a secure sum have one key.")
        if known is None:
            return
        nodes = [card.node for card in cards.values()]
        for number, card in cards.items():
            if card.node not in known or nodes.count(card.node) > 1 or not keys.is_vouched(card):
                raise SympruneError(
                    f"Client {number} of the secure sum is not one of the nodes whose keys the "
                    f"owner of client {self.number} has."
                )

    def _deal(self, index: int, holders: Sequence[int]) -> Slot:
        near = self._neighbours() | {self.number}
        chosen = [holder for holder in holders if holder in near]
        made, least = Secrets.draw(), graph.threshold(len(near))
        if len(chosen) < least:
            raise SympruneError(f"Only {len(chosen)} clients are left to hold shares, not {least}.")
        cards = {holder: keys.Card.unpack(self.roster[holder]) for holder in chosen}
        own = (self.signing, self.reading)
        mail, kept = letters.deal(self.number, index, made, own, cards, least)
        return Slot(index, made, chosen, mail, kept)

    def _neighbours(self) -> frozenset[int]:
        return graph.neighbours(self.roster)[self.number]

    @property
    def least(self) -> int:
        """The fewest clients in a sum: a share of all that began, however many have gone since, and
        no fewer than the owner insists on."""
        return max(self.least_clients, graph.threshold(len(self.roster)))

    def _slot(self, index: int) -> Slot:
        for slot in (self.now, self.next):
            if slot is not None and slot.index == index:
                return slot
        raise SympruneError(f"Client {self.number} was asked for sum {index} out of turn.")

    def mask(
        self,
        index: int,
        rows: Mapping[int, bytes],
        purpose: str,
        what: bytes,
        numbers: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], bytes]:
        """The numbers behind all masks, and a signature on who takes part. rows are the letters of
        all participants by number; purpose is what is summed, what all that the numbers follow
        from: masks hide one vector only, and nothing is in two sums."""
        slot, participants = self._slot(index), sorted(rows)
        heads = {number: row[:HEAD_BYTES] for number, row in rows.items()}
        cards = (self.roster[number] for number in sorted(self.roster))
        about = keys.digest(b"purpose", purpose.encode(), what, *cards)
        agreed = letters.agreement(index, participants, [heads[n] for n in participants], about)
        if self.purposes.setdefault(purpose, index) != index:
            raise SympruneError(
                f"Client {self.number} was asked for {purpose} in a second sum, from which the "
                "statistics of whoever is missing there would fall out."
            )
        if slot.agreed and slot.agreed != agreed:
            raise SympruneError(f"Client {self.number} was told two stories about sum {index}.")
        once = masking.digest(numbers)
        if slot.masked and slot.masked != once:
            raise SympruneError(f"Client {self.number} has masked other numbers in sum {index}.")
        if not slot.agreed:
            self._check_participants(slot, rows)
            self._open(slot, rows)
            slot.participants, slot.heads = participants, heads
            slot.agreed, slot.masked = agreed, once
            self.now, self.next = slot, None
        masked = masking.shift(numbers, slot.secrets.own, add=True)
        for other in sorted(self._neighbours() & set(participants)):
            secret = pair_secret(slot.secrets.pair, slot.heads[other], index, self.number, other)
            masked = masking.shift(masked, secret, add=self.number < other)
        return masked, keys.sign(self.signing, agreed)

    def _check_participants(self, slot: Slot, rows: Mapping[int, bytes]) -> None:
        if self.number not in rows or rows[self.number][:HEAD_BYTES] != slot.secrets.head:
            raise SympruneError(f"Client {self.number} was left out of its own sum.")
        if len(rows) < self.least or not rows.keys() <= self.roster.keys():
            raise SympruneError(
                f"Client {self.number} was asked for a sum of {len(rows)} clients, not of at least "
                f"{self.least} of those that began."
            )

    def _open(self, slot: Slot, rows: Mapping[int, bytes]) -> None:
        slot.held = {self.number: slot.kept}
        for sender in sorted(self._neighbours() & rows.keys()):
            card = keys.Card.unpack(self.roster[sender])
            about = (self.number, sender, slot.index, self.reading, card)
            slot.held[sender] = letters.open_letter(*about, rows[sender])

    def unmask(
        self, index: int, survivors: Sequence[int], agreements: Mapping[int, bytes]
    ) -> tuple[dict[int, bytes], Slot]:
        """A share of each participant, for one story about who is in the sum; and what is dealt out
        for the next sum."""
        slot, told = self._slot(index), sorted(survivors)
        if not slot.agreed or (slot.survivors and slot.survivors != told):
            raise SympruneError(f"Client {self.number} was told two stories about sum {index}.")
        if not set(told) <= set(slot.participants) or self.number not in told:
            raise SympruneError(f"Client {self.number} was asked to unmask a sum without itself.")
        if len(told) < self.least:
            raise SympruneError(f"Client {self.number} was asked to unmask {len(told)} clients.")
        for other in told:
            card = keys.Card.unpack(self.roster[other])
            if not keys.is_signed(card.signs, slot.agreed, agreements.get(other, b"")):
                raise SympruneError(f"Client {other} has not agreed to who takes part in the sum.")
        if not slot.survivors:
            self.next = self._deal(index + 1, told)
            slot.survivors = told
        kinds = {sender: letters.OWN if sender in told else letters.PAIR for sender in slot.held}
        given = {sender: letters.halves(slot.held[sender])[kind] for sender, kind in kinds.items()}
        assert self.next is not None
        return given, self.next

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; secrets included."""
        return _plain(asdict(self))

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Party:
        try:
            party = cls(**_bytes(plain))
            party.now, party.next = (_slot(plain[name]) for name in ("now", "next"))
        except AttributeError as error:
            raise ValueError("what it remembers of its sums is not complete") from error
        return party


def pair_secret(secret: bytes, head: bytes, index: int, one: int, other: int) -> bytes:
    """What two clients mask with in one sum, from either's secret and the other's head."""
    pair = f"mask {index} of {min(one, other)} and {max(one, other)}"
    return keys.agree(secret, head[: keys.KEY_BYTES], pair)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _by_number(plain: Mapping[str, str]) -> dict[int, bytes]:
    return {int(number): bytes.fromhex(text) for number, text in plain.items()}


def _bytes(plain: dict[str, Any]) -> dict[str, Any]:
    told = {name: bytes.fromhex(plain[name]) for name in ("signing", "reading", "card")}
    purposes = {str(name): int(index) for name, index in plain["purposes"].items()}
    return {
        **told,
        "number": int(plain["number"]),
        "least_clients": int(plain["least_clients"]),
        "roster": _by_number(plain["roster"]),
        "purposes": purposes,
    }


def _slot(plain: dict[str, Any] | None) -> Slot | None:
    if plain is None:
        return None
    told = {name: _by_number(plain[name]) for name in ("mail", "heads", "held")}
    single = {name: bytes.fromhex(plain[name]) for name in ("kept", "agreed", "masked")}
    drawn = Secrets(*(bytes.fromhex(plain["secrets"][name]) for name in ("pair", "own")))
    return Slot(**{**plain, **told, **single, "secrets": drawn})
