"""Values on a grid: exact on the wire, unbiased, short as promised, and wary of bytes that lie."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.compressors import TopK, WholeNumbers, parse
from symprune.fed.randomness import Stream
from symprune.fed.wire.grid import BLOCK, LARGEST, decode_on_grid, encode_on_grid, fit_grid
from symprune.fed.wire.parcel import Parcel, Sent, collect, merge
from symprune.fed.wire.payload import decode, encode, encoded_sizes


def rows(count: int, d: int, density: float, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(d)
    values = torch.randn(count, d, generator=generator) * 10 ** torch.linspace(-3, 3, d)
    return (values * (torch.rand(count, d, generator=generator) < density)).to(dtype)


def stream(count: int) -> Stream:
    return Stream.of(0, 0, "test", torch.arange(count))


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 500),
    st.sampled_from([0.0, 0.02, 0.3, 0.7, 1.0]),
)
def test_what_is_on_a_grid_comes_back_bit_for_bit_in_the_bytes_that_were_foreseen(
    bits: int, dtype: torch.dtype, d: int, density: float
) -> None:
    sent = WholeNumbers(bits).sent(rows(3, d, density, dtype), stream(3))
    assert isinstance(sent.tensor, Tensor) and sent.grid is not None
    sizes = encoded_sizes(sent.tensor, grid=sent.grid).tolist()
    for number, row in enumerate(sent.tensor):
        data = encode(row, grid=sent.grid.row(number))
        back = decode(data)
        assert torch.equal(back, row) and back.dtype == dtype
        assert len(data) == sizes[number]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_value_costs_its_bits_and_a_64th_of_a_step(bits: int) -> None:
    d = 6400
    sent = WholeNumbers(bits).sent(rows(1, d, 1.0), stream(1))
    assert sent.grid is not None
    head = 1 + 1 + 2 + 1  # form and type, dimensions, d, bits of the grid
    assert int(encoded_sizes(sent.tensor, grid=sent.grid)) == head + d * bits // 8 + 2 * 100
    assert sent.bits == d * bits + 16 * 100


@pytest.mark.parametrize("bits", [8, 4])
def test_on_top_of_top_k_blocks_hold_64_values_wherever_they_are(bits: int) -> None:
    x = rows(2, 20_000, 1.0)  # the largest values are all at the end
    compressor = parse(f"top-k:1000+int{bits}")
    sent = compressor.sent(x, stream(2))
    assert sent.grid is not None and sent.grid.count.tolist() == [16, 16]
    kept = TopK(1000).compress(x, stream(2))
    support = kept[0] != 0
    assert not sent.tensor[0][~support].any()  # type: ignore[index]
    step = sent.grid.spread(20_000)
    assert bool(((sent.tensor - kept).abs() <= step).all())  # type: ignore[operator]
    plain = encoded_sizes(kept)[0]
    assert int(encoded_sizes(sent.tensor, grid=sent.grid)[0]) < int(plain) - 1000 * (3.8 - bits / 8)


def test_steps_are_no_coarser_than_they_must_be() -> None:
    x = rows(4, 1000, 1.0)
    for bits, largest in LARGEST.items():
        grid = fit_grid(x, bits)
        steps = grid.spread(1000)
        peak = torch.nn.functional.pad(x.abs(), (0, 24)).view(4, -1, BLOCK).amax(2)
        finest = peak.repeat_interleave(BLOCK, 1)[:, :1000] / largest
        assert bool((steps >= finest).all()) and bool((steps <= finest * (1 + 2**-7)).all())


def test_rounding_is_right_in_the_mean() -> None:
    x = rows(1, 100, 1.0)
    draws = 4000
    y = WholeNumbers(4).compress(x.expand(draws, -1).contiguous(), stream(draws))
    step = fit_grid(x, 4).spread(100)[0]
    assert bool(((y.mean(0) - x[0]).abs() < 5 * step / 2 / draws**0.5).all())


def test_a_client_alone_sends_what_it_sends_in_a_stack() -> None:
    x, int4 = torch.cat([rows(2, 300, 1.0), rows(2, 300, 0.1)]), WholeNumbers(4)
    together = int4.sent(x, stream(4))
    alone = [int4.sent(x[i : i + 1], Stream(stream(4).key[i : i + 1])) for i in range(4)]
    whole = merge([{"g": one} for one in alone])
    first, second = (Parcel(m, 4, reply=True) for m in ({"g": together}, whole))
    assert torch.equal(first.sizes(), second.sizes())
    assert [first.encode(i) for i in range(4)] == [second.encode(i) for i in range(4)]
    assert torch.equal(collect([second.encode(i) for i in range(4)])["g"], together.tensor)  # type: ignore[arg-type]


def test_half_precision_is_sent_as_it_is() -> None:
    x = rows(1, 100, 1.0).clamp(-100, 100).half()
    sent = WholeNumbers(8).sent(x, stream(1))
    assert sent.grid is None and sent.tensor.dtype == torch.float16  # type: ignore[union-attr]


def test_an_empty_row_costs_next_to_nothing() -> None:
    sent = WholeNumbers(8).sent(torch.zeros(1, 1000), stream(1))
    assert isinstance(sent, Sent) and int(encoded_sizes(sent.tensor, grid=sent.grid)) < 10


def test_bytes_that_lie_are_refused() -> None:
    for x in (rows(1, 200, 1.0), rows(1, 200, 0.2)):
        sent = WholeNumbers(4).sent(x, stream(1))
        assert isinstance(sent.tensor, Tensor) and sent.grid is not None
        data = encode(sent.tensor[0], grid=sent.grid.row(0))
        with pytest.raises(SympruneError, match="ends before"):
            decode(data[:-1])
        with pytest.raises(SympruneError, match="bytes too many"):
            decode(data + b"0")
        with pytest.raises(SympruneError, match="unknown form"):
            decode(bytes([data[0] | 64]) + data[1:])
    dense = bytearray(encode_dense())
    dense[4] = 128 | 3
    with pytest.raises(SympruneError, match="unknown grid"):
        decode(bytes(dense))


def test_a_value_needs_a_block_and_blocks_an_order() -> None:
    x = torch.zeros(1, 300)
    x[0, 5] = 1.0
    grid = fit_grid(x, 8)
    data = encode_on_grid(x[0, 5:6], torch.tensor([5]), 300, grid)
    value, end = decode_on_grid(data, 0, torch.tensor([7]), 300, torch.float32)
    assert value.tolist() == pytest.approx([1.0], rel=0.01) and end == len(data)
    with pytest.raises(SympruneError, match="before its first block"):
        decode_on_grid(data, 0, torch.tensor([4]), 300, torch.float32)
    twice = replace(grid, starts=torch.tensor([[5, 5]]), count=torch.tensor([2]))
    twice = replace(twice, steps=grid.steps.expand(1, 2))
    data = encode_on_grid(x[0, 5:6], torch.tensor([5]), 300, twice)
    with pytest.raises(SympruneError, match="out of order"):
        decode_on_grid(data, 0, torch.tensor([5]), 300, torch.float32)


def encode_dense() -> bytes:
    sent = WholeNumbers(8).sent(rows(1, 200, 1.0), stream(1))
    assert isinstance(sent.tensor, Tensor) and sent.grid is not None
    return encode(sent.tensor[0], grid=sent.grid.row(0))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_bytes_give_a_tensor_or_a_sentence(data: st.DataObject) -> None:
    sent = WholeNumbers(4).sent(rows(1, 90, 0.3), stream(1))
    assert isinstance(sent.tensor, Tensor) and sent.grid is not None
    good = bytearray(encode(sent.tensor[0], grid=sent.grid.row(0)))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(SympruneError):
        assert bool(torch.isfinite(decode(bytes(good), max_values=1000).double()).all())
