"""Statistics as one vector: added up exactly, whatever the order."""

from __future__ import annotations

from fractions import Fraction

import torch

from symprune.fed.pruning.aggregate.packed_stats import Packed


def packed(samples: int, value: float, rest: float) -> Packed:
    double = torch.float64
    counts = torch.tensor([[samples, 4 * samples]])
    return Packed(counts, torch.tensor([value], dtype=double), torch.tensor([rest], dtype=double))


def test_what_roundings_lost_is_added_up_as_well() -> None:
    total = packed(1, 2.0**54, 1.0)
    for _ in range(3):
        total.add(packed(2, 2.0**54, 1.0))
    found = Fraction(float(total.values)) + Fraction(float(total.rests))
    assert found == 4 * (2**54 + 1) and total.counts.tolist() == [[7, 28]]
