"""Masked summation: masks cancel exactly, a single reply says nothing, sums lose no bit."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symprune.errors import SympruneError
from symprune.fed.pruning import secure_sum as s

SMALLEST = 2.0**-41
numbers = st.one_of(st.just(0.0), st.floats(SMALLEST, 1e9, width=32)).map(float)


def fixed(values: list[float], parties: int = 3) -> np.ndarray:
    tensor = torch.tensor(values, dtype=torch.float64)
    return s.to_fixed(tensor, torch.zeros_like(tensor), parties)


def masked(values: list[list[float]]) -> list[torch.Tensor]:
    secrets = [s.new_secret() for _ in values]
    keys = [s.public_key(secret) for secret in secrets]
    found = []
    for i, row in enumerate(values):
        seeds = {j: s.pair_seed(secrets[i], keys[j], (i, j)) for j in range(len(values)) if j != i}
        found.append(s.as_tensor(s.mask(fixed(row), i, seeds, "0 0")))
    return found


def test_the_group_is_a_safe_prime_of_3072_bits() -> None:
    def is_prime(n: int) -> bool:
        chance = random.Random(0)
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for _ in range(3):
            x = pow(chance.randrange(2, n - 1), odd, n)
            if x not in (1, n - 1) and not any((x := x * x % n) == n - 1 for _ in range(twos - 1)):
                return False
        return True

    assert s.PRIME.bit_length() == 3072
    assert is_prime(s.PRIME) and is_prime((s.PRIME - 1) // 2)
    # The last words of RFC 7919, appendix A.2.
    assert f"{s.PRIME:X}".endswith("25E41D2B66C62E37FFFFFFFFFFFFFFFF")
    assert f"{s.PRIME:X}".startswith("FFFFFFFFFFFFFFFFADF85458A2BB4A9A")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=2, max_size=4))
def test_the_masks_cancel_and_the_sum_is_exact(values: list[list[float]]) -> None:
    found, rest = s.from_fixed(s.total(masked(values)))
    for i in range(4):
        exact = sum((Fraction(row[i]) for row in values), Fraction(0))
        assert Fraction(float(found[i])) + Fraction(float(rest[i])) == exact


def test_negative_numbers_and_pairs_survive() -> None:
    values = torch.tensor([-1.5, 1e15, -(2.0**-41), 0.1], dtype=torch.float64)
    rests = torch.tensor([2.0**-60, -0.01, 0, 1e-18], dtype=torch.float64)
    found, rest = s.from_fixed(s.to_fixed(values, rests, 2))
    for i in range(4):
        exact = Fraction(float(values[i])) + Fraction(float(rests[i]))
        assert abs(Fraction(float(found[i])) + Fraction(float(rest[i])) - exact) <= 2.0**-64


def test_what_one_client_sends_looks_random_and_no_stream_is_used_twice() -> None:
    zeros = [[0.0] * 2000] * 3
    reply = masked(zeros)[0]
    bits = np.unpackbits(reply.numpy().view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.01
    secrets = [s.new_secret(), s.new_secret()]
    seed = s.pair_seed(secrets[0], s.public_key(secrets[1]), (0, 1))
    assert seed == s.pair_seed(secrets[1], s.public_key(secrets[0]), (1, 0))
    streams = {s.mask(fixed([0.0]), 0, {1: seed}, which).tobytes() for which in "abc"}
    others = s.mask(fixed([0.0]), 0, {1: seed, 2: b""}, "a")
    alone = s.mask(fixed([0.0]), 0, {2: b""}, "a")
    assert s.add(others, s.negative(alone)).tobytes() not in streams and len(streams) == 3


def test_a_missing_reply_leaves_noise_not_a_partial_sum() -> None:
    found, _ = s.from_fixed(s.total(masked([[1.0] * 50] * 3)[:2]))
    assert (found.abs() > 1e6).float().mean() > 0.9


def test_overflow_and_false_keys_are_refused() -> None:
    with pytest.raises(SympruneError, match="too large for masked summation"):
        fixed([2.0**62], parties=3)
    for key in (0, 1, s.PRIME - 1, s.PRIME):
        with pytest.raises(SympruneError, match="public key"):
            s.pair_seed(s.new_secret(), key.to_bytes(s.KEY_BYTES, "big"), (0, 1))
