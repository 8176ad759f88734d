"""Who shares masks with whom, and how many must answer.

Up to `COMPLETE` clients all share with all. Beyond, every client has the neighbours on a ring in an
order that follows from everybody's keys (Bell et al. 2020, section 3), so many that with a tenth of
the clients colluding no neighbourhood has a third of them but once in 2^40 runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

from symprune.errors import SympruneError

COMPLETE = 128
MOST_CLIENTS = 1 << 14  # of a federation: what a client keeps room for on a server's word
COLLUDING = 0.1
SECURITY_BITS = 40


def check_clients(clients: int) -> None:
    """Refuse more clients than there can be, before anything is as long as there are clients."""
    if not 1 <= clients <= MOST_CLIENTS:
        raise SympruneError(
            f"A federation has 1 to {MOST_CLIENTS:,} clients that are machines, not {clients:,}."
        )


def threshold(clients: int) -> int:
    """How many of so many must be in a sum, and must give their shares: two thirds, at least 2."""
    return max(2, -(-2 * clients // 3))


def colluders(clients: int) -> int:
    """How many clients may tell the server all they know before a sum could be of one honest client
    alone: the server needs a threshold of shares of two kinds, and honest clients give one."""
    least = threshold(clients)
    return max(0, min(2 * least - clients - 1, least - 2))


def assured(clients: int) -> int:
    """How many honest clients are in a sum at the least, whoever of so many is gone or colludes:
    on whose shares of noise a client may count. One other is never counted on: whoever sees the sum
    and was in it knows its own share of the noise."""
    most = colluders(clients) if clients <= COMPLETE else math.ceil(COLLUDING * clients)
    return max(1, threshold(clients) - max(1, most))


def assured_after_losses(clients: int) -> int:
    """The same when sums may begin with no more than a threshold of so many."""
    return min(assured(left) for left in range(min(threshold(clients), clients), clients + 1))


def neighbours(cards: Mapping[int, bytes]) -> dict[int, frozenset[int]]:
    """Of every client the others it shares masks and secrets with."""
    everyone = frozenset(cards)
    degree = choose_degree(len(cards))
    if degree >= len(cards) - 1:
        return {number: everyone - {number} for number in cards}
    seed = hashlib.sha256(b"".join(cards[number] for number in sorted(cards))).digest()

    def place(number: int) -> bytes:
        return hashlib.sha256(seed + number.to_bytes(8, "big")).digest()

    ring = sorted(cards, key=place)
    steps = [step for far in range(1, degree // 2 + 1) for step in (far, -far)]
    return {
        number: frozenset(ring[(at + step) % len(ring)] for step in steps)
        for at, number in enumerate(ring)
    }


def choose_degree(clients: int) -> int:
    """The smallest even number of neighbours that is enough; all others where clients are few."""
    if clients <= COMPLETE:
        return clients - 1
    bad = math.ceil(COLLUDING * clients)
    for degree in range(2, clients - 1, 2):
        room = 2 * threshold(degree + 1) - (degree + 1)
        if _log2_tail(clients - 1, bad, degree, room) + math.log2(clients) < -SECURITY_BITS:
            return degree
    return clients - 1


def _log2_tail(others: int, bad: int, drawn: int, least: int) -> float:
    """log2 of the chance that of `drawn` others at least so many are bad, without replacement."""
    ways = sum(
        math.comb(bad, found) * math.comb(others - bad, drawn - found)
        for found in range(least, min(bad, drawn) + 1)
    )
    if not ways:
        return -math.inf
    return math.log2(ways) - math.log2(math.comb(others, drawn))
