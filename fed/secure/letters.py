"""What clients send each other through the server: sealed shares, signed, with commitments to them.

For every sum a client makes a new pair of X25519 keys, from which masks with others follow, and a
seed of its own, and deals shares of both out. The server can open none of it, and whoever changes
something is found out: the dealer signs each letter and its commitments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from symprune.errors import SympruneError
from symprune.fed.secure import keys, shares

PAIR, OWN = 0, 1
COMMITMENT_BYTES = 32
HEAD_BYTES = keys.KEY_BYTES + COMMITMENT_BYTES
SEALED_BYTES = 2 * shares.SHARE_BYTES + keys.SEAL_BYTES
LETTER_BYTES = SEALED_BYTES + 2 * COMMITMENT_BYTES + keys.SIGNATURE_BYTES
ROW_BYTES = HEAD_BYTES + LETTER_BYTES


@dataclass
class Secrets:
    """What one client's masks of one sum are made of."""

    pair: bytes
    own: bytes

    @classmethod
    def draw(cls) -> Secrets:
        return cls(keys.new_secret(), keys.new_secret())

    @property
    def head(self) -> bytes:
        """What everybody may know: the public key, and a commitment to the seed."""
        return keys.exchange_key(self.pair) + keys.digest(b"seed", self.own)


def deal(
    number: int, index: int, made: Secrets, own: tuple[bytes, bytes], cards: dict[int, keys.Card],
    least: int,
) -> tuple[dict[int, bytes], bytes]:  # fmt: skip
    """A letter for each holder, and what the dealer keeps itself; own are its signing and reading
    secrets, cards those of all holders."""
    signing, reading = own
    dealt = [shares.split(secret, list(cards), least) for secret in (made.pair, made.own)]
    letters = {}
    for holder, card in cards.items():
        pair = (dealt[PAIR][holder], dealt[OWN][holder])
        key = keys.agree(reading, card.reads, f"letter {index} from {number} to {holder}")
        sealed = keys.seal(key, b"".join(pair))
        body = sealed + b"".join(map(commit, pair))
        letters[holder] = body + keys.sign(signing, _signed(number, holder, index, made.head, body))
    return letters, dealt[PAIR][number] + dealt[OWN][number]


def open_letter(
    number: int, sender: int, index: int, reading: bytes, card: keys.Card, row: bytes
) -> bytes:
    """The two shares in a letter; whoever wrote something else is named."""
    head, letter = row[:HEAD_BYTES], row[HEAD_BYTES:]
    body, signature = letter[: -keys.SIGNATURE_BYTES], letter[-keys.SIGNATURE_BYTES :]
    if not keys.is_signed(card.signs, _signed(sender, number, index, head, body), signature):
        raise SympruneError(f"A letter was not signed by client {sender}, who is said to send it.")
    key = keys.agree(reading, card.reads, f"letter {index} from {sender} to {number}")
    pair = keys.unseal(key, body[:SEALED_BYTES])
    if pair is None or b"".join(map(commit, halves(pair))) != body[SEALED_BYTES:]:
        raise SympruneError(f"Client {sender} dealt out shares that are none.")
    return pair


def halves(pair: bytes) -> tuple[bytes, bytes]:
    return pair[: shares.SHARE_BYTES], pair[shares.SHARE_BYTES :]


def commit(share: bytes) -> bytes:
    return keys.digest(b"share", share)


def commitments(letter: bytes) -> tuple[bytes, bytes]:
    """To the holder's two shares, as its dealer signed them."""
    at = SEALED_BYTES
    first = letter[at : at + COMMITMENT_BYTES]
    return first, letter[at + COMMITMENT_BYTES : at + 2 * COMMITMENT_BYTES]


def agreement(
    index: int, participants: Iterable[int], heads: Iterable[bytes], what: bytes
) -> bytes:
    """What all clients of a sum must have been told alike before any gives a share away."""
    who = keys.numbered(sorted(participants))
    return keys.digest(b"agreement", index.to_bytes(8, "big"), who, *heads, what)


def _signed(sender: int, holder: int, index: int, head: bytes, body: bytes) -> bytes:
    return keys.digest(b"letter", keys.numbered([sender, holder, index]), head, body)
