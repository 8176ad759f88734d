"""Numbers behind masks: masks cancel exactly, sums lose no bit, streams differ by field."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symprune.errors import SympruneError
from symprune.fed.secure import masking as m

SMALLEST = 2.0**-41
numbers = st.one_of(st.just(0.0), st.floats(SMALLEST, 1e9, width=32)).map(float)


def fixed(values: list[float], parties: int = 3) -> dict[str, torch.Tensor]:
    tensor = torch.tensor(values, dtype=torch.float64)
    return {m.WIDE: m.to_fixed(tensor, torch.zeros_like(tensor), parties)}


def key(number: int) -> bytes:
    return bytes([number]) * 32


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(numbers, min_size=4, max_size=4), min_size=2, max_size=4))
def test_masks_come_off_and_the_sum_is_exact(values: list[list[float]]) -> None:
    masked = [m.shift(fixed(row, 4), key(n), add=n % 2 == 0) for n, row in enumerate(values)]
    summed = m.total(masked)
    for n in range(len(values)):
        summed = m.shift(summed, key(n), add=n % 2 == 1)
    found, rest = m.from_fixed(summed[m.WIDE])
    for i in range(4):
        exact = sum((Fraction(row[i]) for row in values), Fraction(0))
        assert Fraction(float(found[i])) + Fraction(float(rest[i])) == exact


def test_negative_numbers_and_pairs_survive() -> None:
    values = torch.tensor([-1.5, 1e15, -(2.0**-41), 0.1], dtype=torch.float64)
    rests = torch.tensor([2.0**-60, -0.01, 0, 1e-18], dtype=torch.float64)
    found, rest = m.from_fixed(m.to_fixed(values, rests, 2))
    for i in range(4):
        exact = Fraction(float(values[i])) + Fraction(float(rests[i]))
        assert abs(Fraction(float(found[i])) + Fraction(float(rest[i])) - exact) <= 2.0**-64


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_whole_numbers_of_every_type_come_back(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    fields = {"a": torch.tensor([limits.min, limits.max, 0, 7], dtype=dtype)}
    masked = m.shift(fields, key(1), add=True)
    assert not torch.equal(masked["a"], fields["a"])
    assert torch.equal(m.shift(masked, key(1), add=False)["a"], fields["a"])
    assert torch.equal(m.shift(m.shift(fields, key(1), False), key(1), True)["a"], fields["a"])


def test_what_is_masked_looks_random_and_every_field_has_a_stream_of_its_own() -> None:
    zeros = torch.zeros(2000, dtype=torch.int64)
    masked = m.shift({"a": zeros, "b": zeros}, key(3), add=True)
    bits = np.unpackbits(masked["a"].numpy().view(np.uint8))
    assert abs(bits.mean() - 0.5) < 0.01
    assert not bool((masked["a"] == masked["b"]).any())


def test_overflow_is_refused() -> None:
    with pytest.raises(SympruneError, match="too large for masked summation"):
        fixed([2.0**62], parties=3)
