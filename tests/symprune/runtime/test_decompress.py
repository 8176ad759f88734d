"""Packed matrices on an accelerator: the same numbers as in main memory."""

from __future__ import annotations

from dataclasses import replace

import pretend_device
import pytest
import torch
from packed_matrices import CODE_KINDS, FLOAT_KINDS, SHAPES, random_codes, random_matrix

from symprune.runtime import decompress, semi_structured
from symprune.runtime.blob import decode, describe, encode_codes, encode_floats

KINDS = (*FLOAT_KINDS, *CODE_KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sparsity", [None, 0.5, 1.0])
def test_rows_are_expanded_as_in_main_memory(kind: str, sparsity: float | None) -> None:
    for rows, columns in SHAPES:
        blob, weight = random_matrix(rows, columns, kind, sparsity)
        assert torch.equal(decompress.expand_rows(blob, 0, rows, torch.float32), weight)
        first, count = rows // 2, rows - rows // 2
        part = decompress.expand_rows(blob, first, count, torch.bfloat16)
        assert torch.equal(part, weight[first:].bfloat16())
        chosen = torch.randint(0, rows, (2, 3), generator=torch.Generator().manual_seed(1))
        assert torch.equal(decompress.gather_rows(blob, chosen, torch.float32), weight[chosen])


def test_a_stack_is_expanded_piece_by_piece_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompress, "AT_ONCE", 8 * 128)
    generator = torch.Generator().manual_seed(0)
    pieces = [random_codes(21, 100, "int3", 0.6, generator) for _ in range(3)]
    blob = encode_codes(pieces, "int3", stacked=True)
    whole = decode(blob, torch.float32)
    x = torch.randn(2, 5, 100, generator=generator)
    for piece in range(3):
        assert torch.equal(
            decompress.expand_rows(blob, 3, 17, torch.float32, piece), whole[piece, 3:20]
        )
        found = decompress.multiply(blob, x, piece=piece, bias=torch.ones(21))
        torch.testing.assert_close(found, x @ whole[piece].T + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_after_the_first_use_nothing_makes_the_host_wait(kind: str) -> None:
    blob, weight = random_matrix(24, 130, kind, 0.5)
    x = torch.randn(4, 130, generator=torch.Generator().manual_seed(2))
    with pretend_device.PretendDevice() as device:
        there, given = blob.to(pretend_device.DEVICE), x.to(pretend_device.DEVICE)
        first = decompress.multiply(there, given)
        before = device.own_waits
        again = decompress.multiply(there, given)
        rows = decompress.gather_rows(
            there, torch.tensor([5, 0]).to(pretend_device.DEVICE), torch.float32
        )
        assert device.own_waits == before
        assert torch.equal(first.cpu(), again.cpu()) and torch.equal(rows.cpu(), weight[[5, 0]])
    torch.testing.assert_close(first.cpu(), x @ weight.T, rtol=1e-5, atol=1e-4)


def test_a_matrix_that_changed_is_read_again() -> None:
    blob, _ = random_matrix(8, 64, "float32", 0.5, seed=0)
    other, weight = random_matrix(8, 64, "float32", 0.9, seed=1)
    decompress.expand_rows(blob, 0, 8, torch.float32)
    blob.resize_(len(other)).copy_(other)
    assert torch.equal(decompress.expand_rows(blob, 0, 8, torch.float32), weight)


def test_two_of_four_goes_to_sparse_cores_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.ones(32, 64, dtype=torch.bfloat16)
    weight[:, ::2] = 0
    layout = describe(encode_floats([weight]))
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert semi_structured.fits(layout, cuda) and semi_structured.is_two_of_four(weight)
    assert not semi_structured.fits(layout, torch.device("cpu"))
    assert not semi_structured.fits(replace(layout, kind="int8"), cuda)
    assert not semi_structured.fits(replace(layout, rows=33), cuda)
    assert not semi_structured.fits(replace(layout, masked=False), cuda)
    assert not semi_structured.fits(replace(layout, pieces=2), cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not semi_structured.fits(layout, cuda)
    weight[0, 1] = weight[0, 2] = 1
    assert not semi_structured.is_two_of_four(weight) and semi_structured.convert(weight) is None
