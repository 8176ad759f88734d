"""Shamir's secret shares of 32 bytes: any `threshold` of them give the secret, fewer give nothing.

A secret is a polynomial's value at 0, modulo a prime just above 2^256; the share of holder x is its
value at x + 1.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from symprune.errors import SympruneError

PRIME = (1 << 256) + 297
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, bytes]:
    """A share for every holder, by its number."""
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(set(holders)):
        raise SympruneError(f"{len(holders)} holders cannot share a secret among {threshold}.")
    rest = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients = [int.from_bytes(secret, "big"), *rest]
    return {holder: _value(coefficients, holder + 1) for holder in holders}


def _value(coefficients: Sequence[int], x: int) -> bytes:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * x + coefficient) % PRIME
    return total.to_bytes(SHARE_BYTES, "big")


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes | None:
    """The secret behind shares, by holder; None if these are shares of nothing."""
    if len(shares) < threshold:
        raise SympruneError(f"{len(shares)} shares are fewer than the {threshold} that are needed.")
    points = {x + 1: int.from_bytes(shares[x], "big") for x in sorted(shares)[:threshold]}
    total = 0
    for x, y in points.items():
        above = below = 1
        for other in points.keys() - {x}:
            above, below = above * other % PRIME, below * (other - x) % PRIME
        total += y * above * pow(below, -1, PRIME)
    total %= PRIME
    return total.to_bytes(SECRET_BYTES, "big") if total >> 256 == 0 else None
