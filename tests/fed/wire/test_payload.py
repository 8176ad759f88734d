"""Payloads: lossless, as short as promised, and wary of bytes that lie."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from symprune.errors import SympruneError
from symprune.fed.compressors import QSGD, Natural, RandK, TopK
from symprune.fed.wire.bits import varints
from symprune.fed.wire.payload import (
    DENSE,
    DTYPES,
    INDEXED,
    MASKED,
    decode,
    decode_message,
    encode,
    encode_message,
    encoded_sizes,
    message_overhead,
)


def random_tensor(dtype: torch.dtype, size: int, density: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(size, generator=generator) < density
    values = torch.randn(size, generator=generator) * 50
    return torch.where(keep, values, 0).to(dtype)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 700),
    st.sampled_from([0.0, 0.01, 0.1, 0.6, 1.0]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_decoding_gives_back_the_same_bits_and_the_size_is_known_beforehand(
    dtype: torch.dtype, size: int, density: float, table: bool, seed: int
) -> None:
    x = random_tensor(dtype, size, density, seed)
    if table and dtype.is_floating_point:
        x = x.sign() * 3
    data = encode(x, table)
    back = decode(data)
    assert back.dtype == x.dtype and back.shape == x.shape and torch.equal(back, x)
    assert len(data) == int(encoded_sizes(x.unsqueeze(0), table)[0])


def test_shapes_survive() -> None:
    for shape in [(), (3,), (2, 0, 4), (5, 1, 7)]:
        x = torch.randn(shape)
        assert torch.equal(decode(encode(x)), x)


def test_one_value_of_d_costs_its_index_and_itself() -> None:
    x = torch.zeros(112)
    x[40] = 1.5
    # form and type 1, shape 2, count 1, index of 7 bits 1, value 4
    assert len(encode(x)) == 9


def test_a_bit_mask_is_chosen_in_between_and_dense_at_the_end() -> None:
    d = 10_000
    assert len(encode(random_tensor(torch.float32, d, 1.0, 0))) == 4 * d + 4
    half = random_tensor(torch.float32, d, 0.5, 0)
    kept = int(torch.count_nonzero(half))
    assert len(encode(half)) == 4 * kept + d // 8 + 4


def test_quantised_values_cost_a_short_code_each() -> None:
    x = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    natural = Natural().compress(x, generator)
    qsgd = QSGD(4).compress(x, generator)
    assert len(encode(natural, table=True)) < 4000  # less than a byte a value
    assert len(encode(qsgd, table=True)) < 4000 * 4 // 8 + 100
    assert torch.equal(decode(encode(natural, table=True)), natural)


def test_sizes_of_a_stack_are_those_of_its_rows() -> None:
    x = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    for compressor in (TopK(7), RandK(100), QSGD(2), Natural()):
        rows = compressor.compress(x, torch.Generator().manual_seed(1))
        sizes = [len(encode(row, compressor.quantises)) for row in rows]
        assert encoded_sizes(rows, compressor.quantises).tolist() == sizes


def test_messages_carry_names_and_refuse_leftovers() -> None:
    fields = {"x": torch.randn(10), "mask": torch.rand(20) > 0.5}
    data = encode_message(fields)
    assert len(data) == message_overhead(["x", "mask"]) + sum(
        len(encode(t)) for t in fields.values()
    )
    back = decode_message(data)
    assert list(back) == ["x", "mask"] and all(torch.equal(back[k], fields[k]) for k in fields)
    with pytest.raises(SympruneError, match="too many"):
        decode_message(data + b"\0")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_on_both_sides(value: float) -> None:
    with pytest.raises(SympruneError, match="not finite"):
        encode(torch.tensor([1.0, value]))
    poisoned = encode(torch.tensor([1.0, 2.0]))[:-4] + torch.tensor([value]).numpy().tobytes()
    with pytest.raises(SympruneError, match="not finite"):
        decode(poisoned)


def test_a_header_that_claims_too_much_is_refused_before_any_allocation() -> None:
    sparse = torch.zeros(1 << 20)
    sparse[3] = 1
    data = encode(sparse)
    assert len(data) < 20
    with pytest.raises(SympruneError, match="at most 1000 are expected"):
        decode(data, max_values=1000)


def read_or_refuse(read: Callable[[bytes, int], object], data: bytes) -> None:
    """Anything but a result or the one error a user may see fails the test."""
    with contextlib.suppress(SympruneError):
        read(data, 10_000)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_a_tensor_or_a_clear_error(data: bytes) -> None:
    read_or_refuse(decode, data)
    read_or_refuse(decode_message, data)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 400), st.integers(0, 255))
def test_a_damaged_payload_never_crashes(seed: int, place: int, byte: int) -> None:
    data = bytearray(encode(random_tensor(torch.float32, 97, 0.2, seed)))
    data[place % len(data)] = byte
    read_or_refuse(decode, bytes(data))


def head(dtype: torch.dtype, form: int, *numbers: int, coded: bool = False) -> bytes:
    """How a payload begins."""
    return bytes([DTYPES.index(dtype) | form << 4 | coded << 6]) + varints(*numbers)


def test_fields_of_a_message_share_one_limit() -> None:
    data = encode_message({"a": torch.zeros(600), "b": torch.zeros(600)})
    assert len(decode_message(data, 1200)) == 2
    with pytest.raises(SympruneError, match="claims 600 values; at most 599"):
        decode_message(data, 1199)


def test_a_payload_has_no_more_dimensions_than_any_tensor_here() -> None:
    assert decode(head(torch.uint8, DENSE, 8, *[1] * 8) + b"7").shape == (1,) * 8
    with pytest.raises(SympruneError, match="claims 9 dimensions"):
        decode(head(torch.uint8, DENSE, 9, *[1] * 9) + b"7")


def test_a_table_is_no_longer_than_one_that_is_ever_written() -> None:
    long = 1 << 13
    data = head(torch.uint8, DENSE, 1, 1, coded=True) + varints(long) + bytes(long + 2)
    with pytest.raises(SympruneError, match=f"table claims {long} entries"):
        decode(data)


@pytest.mark.parametrize("places", [(2, 1), (1, 1), (1, 6)], ids=str)
def test_indices_rise_and_stay_inside(places: tuple[int, int]) -> None:
    """Two of five values, at three bits an index."""

    def indexed(first: int, second: int) -> bytes:
        return head(torch.uint8, INDEXED, 1, 5, 2) + bytes([first | second << 3]) + b"ab"

    assert decode(indexed(1, 4)).tolist() == [0, ord("a"), 0, 0, ord("b")]
    with pytest.raises(SympruneError, match="out of range or out of order"):
        decode(indexed(*places))


def test_every_form_refuses_values_that_are_not_finite() -> None:
    nan = torch.tensor([float("nan")]).numpy().tobytes()
    for start in (
        head(torch.float32, DENSE, 1, 1),
        head(torch.float32, INDEXED, 1, 4, 1) + bytes([2]),
        head(torch.float32, MASKED, 1, 4) + bytes([2]),
        head(torch.float32, DENSE, 1, 3, coded=True) + varints(1),
    ):
        with pytest.raises(SympruneError, match="not finite"):
            decode(start + nan)


@pytest.mark.parametrize("shape", [(0, 2**62, 2**62), (2**40, 0), (2**62, 2**62, 0, 3)])
def test_a_zero_beside_huge_dimensions_is_refused_like_any_other_size(shape: tuple[int]) -> None:
    claim = bytes([0]) + varints(len(shape), *shape)
    with pytest.raises(SympruneError, match="claims"):
        decode(claim)
    assert decode(encode(torch.zeros(0, 650))).shape == (0, 650)
