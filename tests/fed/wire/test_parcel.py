"""Parcels: every client's message, what it weighs and what the papers count for it."""

from __future__ import annotations

import torch

from symprune.fed.wire.parcel import Parcel, Sent, collect, merge


def test_the_papers_bits_are_those_of_one_clients_message() -> None:
    """32 a float and 1 a bool of its own row, or of all where everyone gets the same."""
    rows, mask = torch.ones(3, 5), torch.ones(3, 7, dtype=torch.bool)
    assert Parcel({"w": rows, "mask": mask}, 3, reply=True).bits().tolist() == [167] * 3
    assert Parcel({"x": torch.ones(5)}, 3, reply=False).bits().tolist() == [160] * 3
    assert Parcel({"x": Sent(rows, each=True)}, 3, reply=False).bits().tolist() == [160] * 3
    ragged = [torch.ones(n) for n in (1, 2, 4)]
    assert Parcel({"v": Sent(ragged)}, 3, reply=True).bits().tolist() == [32, 64, 128]
    counted = Sent(rows, bits=torch.tensor([1, 2, 3]))
    assert Parcel({"w": counted}, 3, reply=True).bits().tolist() == [1, 2, 3]


def test_a_parcel_weighs_what_its_messages_do_and_arrives_as_it_was() -> None:
    w = torch.randn(3, 20) * (torch.rand(3, 20) < 0.3)
    parcel = Parcel({"w": w, "n": torch.arange(3)}, 3, reply=True)
    messages = [parcel.encode(row) for row in range(3)]
    assert parcel.sizes().tolist() == [len(message) for message in messages]
    arrived = collect(messages)
    assert torch.equal(arrived["w"], w) and torch.equal(arrived["n"], torch.arange(3))


def test_replies_of_several_stacks_are_one_message_in_order() -> None:
    parts = [{"w": Sent(torch.full((n, 2), float(n)), bits=torch.full((n,), n))} for n in (1, 2)]
    merged = merge(parts)["w"]
    assert isinstance(merged, Sent) and isinstance(merged.tensor, torch.Tensor)
    assert merged.tensor.tolist() == [[1, 1], [2, 2], [2, 2]]
    assert isinstance(merged.bits, torch.Tensor) and merged.bits.tolist() == [1, 2, 2]
