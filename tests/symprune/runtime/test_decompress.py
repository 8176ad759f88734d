"""Packed matrices on an accelerator: the same numbers as in main memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pretend_device
import pytest
import torch
import torch.nn.functional as F
from packed_matrices import CODE_KINDS, FLOAT_KINDS, SHAPES, random_codes, random_matrix
from torch import Tensor
from torch.sparse import _semi_structured_conversions as conversions

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


class InHalves(Tensor):
    """Stands in for what torch makes of a 2:4 matrix on a GPU: kept in the two parts that torch's
    own conversion finds, made out of no other, and good for products only."""

    products = 0
    parts: Any

    @staticmethod
    def __new__(cls, weight: Tensor) -> InHalves:
        made: InHalves = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, weight.shape, dtype=weight.dtype, device=weight.device
        )
        made.parts = conversions.sparse_semi_structured_from_dense_cutlass(weight)
        return made

    def __init__(self, weight: Tensor) -> None:
        """All is done in `__new__`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return super().__torch_function__(func, types, args, kwargs or {})
        assert func is F.linear, func
        x, weight, bias = args
        InHalves.products += 1
        values, places = weight.parts
        assert 2 * values.shape[1] == x.shape[-1]
        dense = conversions.sparse_semi_structured_to_dense_cutlass(values, places)
        return F.linear(x, dense, bias)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a matrix that is in two parts")


@pytest.fixture
def sparse_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has them, for matrices that are in main memory."""
    fits = semi_structured.fits
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", InHalves)
    monkeypatch.setattr(
        semi_structured, "fits", lambda layout, device: fits(layout, torch.device("cuda", 0))
    )
    InHalves.products = 0


def two_of_four(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(rows, columns // 4, 4, generator=generator)
    pruned = torch.rand(weight.shape, generator=generator).argsort(-1) < 2
    return weight.masked_fill(pruned, 0).view(rows, columns).to(dtype)


@pytest.mark.usefixtures("sparse_cores")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_of_four_in_16_bits_is_multiplied_by_sparse_cores(dtype: torch.dtype) -> None:
    weight = two_of_four(64, 128, dtype)
    blob = encode_floats([weight])
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(4)).to(dtype)
    bias = torch.arange(64.0)
    for number in (1, 2):
        found = decompress.multiply(blob, x, bias=bias)
        assert InHalves.products == number
        assert found.dtype == dtype and torch.equal(found, F.linear(x, weight, bias.to(dtype)))
    assert torch.equal(decompress.expand_rows(blob, 3, 40, dtype), weight[3:43])
    assert torch.equal(decompress.gather_rows(blob, torch.tensor([9]), dtype), weight[9:10])
    # Inputs of another type are none that they take.
    exact = x.float() @ weight.float().T
    torch.testing.assert_close(decompress.multiply(blob, x.float()), exact, rtol=1e-5, atol=1e-4)
    assert InHalves.products == 2


@pytest.mark.usefixtures("sparse_cores")
@pytest.mark.parametrize("case", ["half of all", "rows", "wide", "no tensor cores", "refused"])
def test_all_else_is_decompressed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: Tensor) -> Tensor:
        raise RuntimeError("not on this device")

    weight = two_of_four(33 if case == "rows" else 64, 128, torch.bfloat16)
    if case == "half of all":
        weight = random_matrix(64, 128, "bfloat16", 0.5)[1].bfloat16()
    if case == "wide":
        weight = weight.float()
    if case == "no tensor cores":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    if case == "refused":
        monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", refuse)
    blob = encode_floats([weight])
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(5)).to(weight.dtype)
    found = decompress.multiply(blob, x)
    torch.testing.assert_close(found, x @ weight.T, rtol=2**-7, atol=1e-2)
    assert InHalves.products == 0
