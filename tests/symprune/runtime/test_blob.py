"""Packed matrices: every bit comes back, the format is as written down, damage is one sentence."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packed_matrices import CODE_KINDS, FLOAT_KINDS, SHAPES, dense_of, random_codes, random_matrix
from torch import Tensor

from symprune.errors import SympruneError
from symprune.runtime import blob as packed
from symprune.runtime.layout import FLOATS
from symprune.runtime.multiply import force_level, levels

SPARSITIES = [None, 0.0, 0.5, 0.9, 1.0]


@pytest.fixture(autouse=True, params=["portable", "compiled"])
def codec(request: pytest.FixtureRequest) -> Iterator[str]:
    """The numpy reference, then the same by the compiled kernels."""
    if request.param == "compiled" and levels() == ["portable"]:
        pytest.skip("the kernels are not compiled here")
    force_level("portable" if request.param == "portable" else None)
    yield request.param
    force_level(None)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view({2: torch.int16, 4: torch.int32}[values.element_size()])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", FLOAT_KINDS)
@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_floats_come_back_bit_for_bit(
    shape: tuple[int, int], kind: str, sparsity: float | None
) -> None:
    blob, weight = random_matrix(*shape, kind, sparsity)
    packed.check(blob)
    found = packed.decode(blob, FLOATS[kind])
    assert torch.equal(bits(found), bits(weight.to(FLOATS[kind])))
    assert packed.describe(blob).shape == shape
    assert torch.equal(packed.decode(blob, torch.float32), weight)


@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_minus_zero_and_every_nan_survive_a_mask(kind: str) -> None:
    dtype = FLOATS[kind]
    generator = torch.Generator().manual_seed(1)
    size = torch.tensor([], dtype=dtype).element_size()
    raw = torch.randint(0, 256, (24, 100 * size), generator=generator, dtype=torch.uint8)
    weight = raw.view(dtype).clone()  # any bits at all, NaNs among them
    weight[torch.rand(24, 100, generator=generator) < 0.6] = 0
    weight[0, :3] = torch.tensor([-0.0, torch.nan, -torch.inf])
    blob = packed.encode_floats([weight])
    assert packed.describe(blob).masked
    assert torch.equal(bits(packed.decode(blob, dtype)), bits(weight))
    assert torch.equal(packed.keep_mask(blob), bits(weight) != 0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", CODE_KINDS)
@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_codes_and_scales_and_masks_come_back(
    shape: tuple[int, int], kind: str, sparsity: float | None
) -> None:
    codes, scales, keep = random_codes(*shape, kind, sparsity, torch.Generator().manual_seed(2))
    blob = packed.encode_codes([(codes, scales, keep)], kind)
    packed.check(blob)
    found_codes, found_scales, found_keep = packed.decode_codes(blob)[0]
    full = torch.ones_like(codes, dtype=torch.bool) if keep is None else keep
    assert packed.describe(blob).masked == (not full.all())
    assert (found_keep is None) == bool(full.all())
    assert torch.equal(packed.keep_mask(blob), full)
    assert torch.equal(found_codes, torch.where(full, codes, 0))
    assert torch.equal(found_scales, scales)
    assert torch.equal(packed.decode(blob, torch.float32), dense_of((codes, scales, keep), kind))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int3"])
def test_stacks_and_transposed_matrices_have_their_own_shape(transposed: bool, kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    if kind == "bfloat16":
        pieces = [torch.randn(10, 70, generator=generator).bfloat16() for _ in range(3)]
        pieces[1][:, ::2] = 0
        blob = packed.encode_floats(pieces, transposed=transposed, stacked=True)
        dense = torch.stack(pieces).float()
    else:
        codes = [random_codes(10, 70, kind, s, generator) for s in (0.5, None, 1.0)]
        blob = packed.encode_codes(codes, kind, transposed=transposed, stacked=True)
        dense = torch.stack([dense_of(each, kind) for each in codes])
        for each, (found, _, keep) in zip(codes, packed.decode_codes(blob), strict=True):
            full = torch.ones_like(found, dtype=torch.bool) if each[2] is None else each[2]
            assert torch.equal(keep, full) and torch.equal(found, torch.where(full, each[0], 0))
    packed.check(blob)
    expected = dense.transpose(1, 2) if transposed else dense
    assert packed.describe(blob).shape == tuple(expected.shape)
    assert torch.equal(packed.decode(blob, torch.float32), expected)
    assert packed.keep_mask(blob).shape == expected.shape


def test_one_matrix_may_be_a_stack_or_not() -> None:
    weight = torch.ones(3, 5)
    assert packed.describe(packed.encode_floats([weight])).shape == (3, 5)
    assert packed.describe(packed.encode_floats([weight], stacked=True)).shape == (1, 3, 5)
    turned = packed.encode_floats([weight], transposed=True)
    assert torch.equal(packed.decode(turned, torch.float32), weight.T)


def test_the_bytes_are_as_the_format_says() -> None:
    codes = torch.arange(65, dtype=torch.uint8)[None] % 8
    scales = torch.tensor([[1.0, 2.0]]).bfloat16()
    keep = torch.zeros(1, 65, dtype=torch.bool)
    keep[0, [1, 2, 63, 64]] = True
    raw = bytes(packed.encode_codes([(codes, scales, keep)], "int3").numpy())
    assert raw[:8] == b"SYMPACK\x01"
    assert struct.unpack("<6IQ", raw[8:40]) == (2, 5, 1, 1, 65, 0, len(raw))
    assert struct.unpack("<2q", raw[64:80]) == (0, 163)
    first = struct.pack("<8Q", 2 + 4 + 2**63, *[0] * 7) + struct.pack("<8H", 0x3F80, *[0] * 7)
    second = struct.pack("<8Q", 1, *[0] * 7) + struct.pack("<8H", 0x4000, *[0] * 7)
    assert raw[80:] == (
        first + bytes([1 | 2 << 3 | (7 << 6) & 255, 7 >> 2]) + second + b"\0" + bytes(64)
    )


def test_a_blob_without_a_mask_is_as_large_as_its_values_and_scales() -> None:
    codes = random_codes(16, 128, "int4", None, torch.Generator().manual_seed(0))
    layout = packed.describe(packed.encode_codes([codes], "int4"))
    assert layout.bits == 16 * 128 * 4 + 16 * 2 * 16 + 8 * (64 + 3 * 8 + 64)
    assert layout.weights == 16 * 128


def test_floats_are_masked_when_that_is_smaller() -> None:
    few = torch.ones(8, 64)
    few[0, :2] = 0  # saves 8 bytes, costs 64
    assert not packed.describe(packed.encode_floats([few])).masked
    few[0] = 0
    assert packed.describe(packed.encode_floats([few])).masked


@pytest.mark.parametrize("kind", [*FLOAT_KINDS, *CODE_KINDS])
@pytest.mark.parametrize("sparsity", [None, 0.5, 1.0])
def test_both_codecs_write_the_same_bytes(kind: str, sparsity: float | None) -> None:
    for shape in SHAPES:
        force_level(None)
        compiled, _ = random_matrix(*shape, kind, sparsity)
        force_level("portable")
        assert torch.equal(random_matrix(*shape, kind, sparsity)[0], compiled)


def test_chunks_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, weight = random_matrix(100, 130, "bfloat16", 0.5)
    monkeypatch.setattr(packed, "AT_ONCE", 1)
    parts, _ = random_matrix(100, 130, "bfloat16", 0.5)
    packed.check(parts)
    assert torch.equal(whole, parts)
    assert torch.equal(packed.decode(whole, torch.float32), weight)


def test_bad_pieces_are_refused_in_one_sentence() -> None:
    codes, scales, keep = random_codes(4, 70, "int4", 0.5, torch.Generator().manual_seed(0))
    for bad in [
        ([(codes, scales[:, :1], keep)], "int4"),
        ([(codes, scales.float(), keep)], "int4"),
        ([(codes.int(), scales, keep)], "int4"),
        ([(codes, scales, keep[:1])], "int4"),
        ([(codes + 16, scales, keep)], "int4"),
        ([(codes * 0, scales, keep)], "int8"),
        ([(codes, scales * torch.inf, keep)], "int4"),
        ([(codes, scales, keep)], "int5"),
        ([(codes, scales, keep)] * 2, "int4"),
        ([], "int4"),
    ]:
        with pytest.raises(SympruneError, match=r"^[^.]*\.$"):
            packed.encode_codes(*bad)
    for pieces in ([torch.ones(2, 2).double()], [torch.ones(2)], [torch.ones(0, 2)]):
        with pytest.raises(SympruneError, match=r"^[^.]*\.$"):
            packed.encode_floats(pieces)
    with pytest.raises(SympruneError, match="no codes"):
        packed.decode_codes(packed.encode_floats([torch.ones(2, 2)]))


def test_another_version_and_other_tensors_are_refused_by_name() -> None:
    blob, _ = random_matrix(3, 70, "int8", 0.5)
    for version in (1, 3):
        other_version = blob.clone()
        other_version[8] = version
        with pytest.raises(SympruneError, match=f"version {version} of the format; this symprune"):
            packed.describe(other_version)
    for other in (torch.zeros(500, dtype=torch.uint8), blob.float(), blob[None], blob[:20]):
        with pytest.raises(SympruneError, match="not a packed matrix"):
            packed.describe(other)


def test_a_blob_cut_anywhere_is_refused() -> None:
    blob, _ = random_matrix(9, 70, "int3", 0.5)
    for size in range(0, blob.numel(), 7):
        with pytest.raises(SympruneError):
            packed.check(blob[:size])
    with pytest.raises(SympruneError):
        packed.check(torch.cat([blob, blob[-1:]]))


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    kind=st.sampled_from(["float32", "bfloat16", "int8", "int4", "int3"]),
    sparsity=st.sampled_from([None, 0.5]),
    changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4),
    in_front=st.booleans(),
)
def test_a_changed_blob_is_refused_or_decodes_to_its_own_shape(
    kind: str, sparsity: float | None, changes: list[tuple[int, int]], in_front: bool
) -> None:
    blob, _ = random_matrix(11, 70, kind, sparsity)
    for place, value in changes:
        blob[place % (100 if in_front else blob.numel())] = value
    try:
        packed.check(blob)
    except SympruneError:
        return
    layout = packed.describe(blob)
    assert packed.decode(blob, torch.float32).shape == layout.shape


def test_a_header_that_promises_too_much_is_refused_at_once() -> None:
    blob, _ = random_matrix(8, 64, "int8", 0.5)
    for place in (20, 24, 28):  # rows, columns, pieces
        huge = blob.clone()
        huge[place : place + 4] = torch.from_numpy(np.full(4, 255, np.uint8))
        with pytest.raises(SympruneError, match="cut off"):
            packed.check(huge)


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.weight", "experts.gate_up_proj", "weight"]
)
def test_names_of_packed_parameters_can_be_turned_back(name: str) -> None:
    assert packed.parameter_name(packed.packed_name(name)) == name


def test_packed_names_are_the_models_own() -> None:
    assert packed.packed_name("layers.0.q.weight") == "layers.0.q.packed"
    assert packed.packed_name("experts.gate_up_proj") == "experts.gate_up_proj_packed"
    with pytest.raises(SympruneError, match="not the name"):
        packed.parameter_name("layers.0.q.weight")
