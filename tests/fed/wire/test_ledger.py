"""The ledger: every message on the account of who sent or got it."""

from __future__ import annotations

import torch

from symprune.fed.wire.ledger import Ledger


def test_a_bill_says_what_a_round_and_a_client_cost() -> None:
    ledger = Ledger.empty(4)
    ledger.up(torch.tensor([0, 2]), torch.tensor([100, 300]), torch.tensor([1, 1]))
    ledger.down(torch.arange(4), torch.tensor([10, 10, 10, 10]), torch.tensor([1, 1, 1, 1]))
    bill = ledger.bill(2)
    assert bill["up"] == {
        "total": 400,
        "per round": 200,
        "per client": 100,
        "per client and round": 50,
        "smallest client": 0,
        "largest client": 300,
    }
    assert bill["down"]["per client and round"] == 5
    assert ledger.bill(0)["up"]["total"] == 400


def test_bytes_and_bits_are_booked_by_client_and_direction() -> None:
    ledger = Ledger.empty(3)
    some, both = torch.tensor([0, 2]), torch.tensor([10, 20])
    ledger.up(some, both, torch.tensor([1, 3]))
    ledger.down(torch.tensor([1]), torch.tensor([5]), torch.tensor([6]))
    ledger.up(some, both, torch.tensor([1, 3]))
    assert ledger.up_bytes.tolist() == [20, 0, 40] and ledger.down_bytes.tolist() == [0, 5, 0]
    assert ledger.up_bits.tolist() == [2, 0, 6] and ledger.down_bits.tolist() == [0, 6, 0]
    totals = {"bytes_up": 60, "bytes_down": 5, "paper_bits_up": 8 / 3, "paper_bits_down": 2.0}
    assert ledger.totals() == totals
