"""Packed modules alone: they are the modules they were, their weights expanded when needed."""

from __future__ import annotations

import copy
import io

import pretend_device
import pytest
import torch
import torch.nn.functional as F
from packed_models import rounded
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from symprune.errors import SympruneError
from symprune.runtime.blob import encode_codes, encode_floats
from symprune.runtime.layers import (
    PackedEmbedding,
    PackedLinear,
    PackedModule,
    pack_parameter,
    unpack_parameter,
)
from symprune.runtime.packed_tensor import PackedTensor


def sparse(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*shape, generator=generator)
    return weight.masked_fill_(torch.rand(*shape, generator=generator) < 0.5, 0)


def linear(rows: int = 12, columns: int = 70, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """A linear layer and the same one packed."""
    dense = nn.Linear(columns, rows, bias=bias)
    dense.weight.data = sparse(rows, columns)
    packed = copy.deepcopy(dense)
    pack_parameter(packed, "weight", encode_floats([dense.weight.data]))
    return dense, packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(70,), (3, 70), (2, 5, 70), (0, 70)])
def test_a_packed_linear_layer_gives_what_the_dense_one_does(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    dense, packed = linear()
    x = torch.randn(shape).to(dtype)
    found, expected = packed(x), dense.to(torch.float64)(x.double())
    assert found.dtype == dtype and found.shape == expected.shape
    near = 1e-5 if dtype in (torch.float32, torch.float64) else 0.05
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=near)


def test_a_packed_module_is_still_what_it_was() -> None:
    dense, packed = linear()
    assert isinstance(packed, PackedLinear) and isinstance(packed, PackedModule)
    assert (packed.in_features, packed.out_features) == (70, 12)
    assert list(packed.state_dict()) == ["bias", "packed"]
    assert not packed.get_parameter("packed").requires_grad
    assert torch.equal(packed.weight + 0, dense.weight)
    shown = repr(packed)
    assert shown.startswith("PackedLinear(in_features=70, out_features=12, bias=True, float32, ")
    assert "% zeros" in shown and "bits a weight" in shown


def test_the_layer_gpt2_uses_is_packed_the_other_way_round() -> None:
    dense = Conv1D(12, 70)
    dense.weight.data = sparse(70, 12)
    packed = copy.deepcopy(dense)
    pack_parameter(packed, "weight", encode_floats([dense.weight.data.T], transposed=True))
    x = torch.randn(2, 3, 70)
    torch.testing.assert_close(packed(x), dense(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(packed.weight + 0, dense.weight)


@pytest.mark.parametrize("kind", ["int8", "int4", "int3", "int2"])
def test_an_embedding_decodes_the_rows_that_are_asked_for(kind: str) -> None:
    packed = nn.Embedding(20, 70, padding_idx=0)
    weight = sparse(20, 70)
    found = rounded(weight, kind)
    blob = encode_codes([(found.codes, found.scales, weight != 0)], kind)
    pack_parameter(packed, "weight", blob)
    assert isinstance(packed, PackedEmbedding)
    indices = torch.tensor([[3, 0], [19, 3]])
    assert torch.equal(packed(indices), (packed.weight + 0)[indices])
    with pytest.raises(SympruneError, match="outside"):
        packed(torch.tensor([20]))


def test_gradients_reach_the_input_and_the_bias_but_not_the_weights() -> None:
    dense, packed = linear()
    x = torch.randn(4, 70)
    given, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    packed(given).square().sum().backward()
    dense(expected).square().sum().backward()
    torch.testing.assert_close(given.grad, expected.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed.bias.grad, dense.bias.grad, rtol=1e-4, atol=1e-4)
    assert packed.get_parameter("packed").grad is None


class Experts(nn.Module):
    """Experts in one parameter, used one at a time or all at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(sparse(3, 12, 70))
        self.down = nn.Parameter(sparse(3, 12, 9, seed=1))
        self.flat = nn.Parameter(sparse(3 * 4, 9, seed=2))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        one = F.linear(x, self.up[expert]) @ self.down[-1]
        stack = self.flat.view(3, 4, 9).transpose(1, 2)
        return torch.bmm(one.expand(3, -1, -1), stack)


def packed_experts() -> tuple[Experts, Experts]:
    dense = Experts()
    packed = copy.deepcopy(dense)
    pack_parameter(packed, "up", encode_floats(list(dense.up.data), stacked=True))
    turned = [piece.T for piece in dense.down.data]
    pack_parameter(packed, "down", encode_floats(turned, transposed=True, stacked=True))
    rows = list(dense.flat.data.view(3, 4, 9))
    pack_parameter(packed, "flat", encode_floats(rows, stacked=True))
    return dense, packed


def test_experts_are_multiplied_without_being_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, packed = packed_experts()
    assert list(packed.state_dict()) == ["up_packed", "down_packed", "flat_packed"]
    x = torch.randn(5, 70)
    expected = dense(x, torch.tensor(1))
    with monkeypatch.context() as patched:
        patched.delattr(PackedTensor, "dense")
        found = packed(x, torch.tensor(1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_any_other_operation_sees_the_weights_as_they_are() -> None:
    dense, packed = packed_experts()
    assert packed.up.shape == dense.up.shape and len(packed.up) == 3
    assert packed.up.dtype == torch.float32 and packed.up.device == dense.up.device
    for name in ("up", "down", "flat"):
        weight, expected = getattr(packed, name), getattr(dense, name).data
        assert isinstance(weight, Tensor)
        assert torch.equal(weight.clone(), expected)
        assert torch.equal(weight[[0, 2]], expected[[0, 2]])
        assert torch.equal(weight.transpose(0, 1), expected.transpose(0, 1))
        assert torch.equal(torch.cat([weight, weight]), torch.cat([expected, expected]))
        assert torch.equal(weight.to(torch.bfloat16) + 0, expected.bfloat16())
        assert weight.abs().max() == expected.abs().max()
    with pytest.raises(IndexError):
        packed.up[3]


def test_what_is_written_into_packed_weights_is_refused_not_lost() -> None:
    _, packed = linear()
    for change in (
        lambda: packed.weight.zero_(),
        lambda: packed.weight.data.fill_(1),
        lambda: nn.init.normal_(packed.weight),
        lambda: packed.weight.__setitem__(0, 1.0),
        lambda: packed.weight.requires_grad_(),
    ):
        with pytest.raises(SympruneError, match=r"cannot be changed in place; model\.dequantize"):
            change()
    with pytest.raises(KeyError):
        packed.weight = nn.Parameter(torch.zeros(12, 70))


def test_a_type_asked_for_is_the_type_of_the_weight_and_the_bias() -> None:
    _, packed = linear()
    packed.half()
    assert packed.weight.dtype == packed.bias.dtype == torch.float16
    assert packed.get_parameter("packed").dtype == torch.uint8
    packed.to(torch.bfloat16)
    assert packed.weight.dtype == torch.bfloat16


def test_copies_and_files_hold_packed_modules() -> None:
    for dense, packed in (linear(), packed_experts()):
        file = io.BytesIO()
        torch.save(packed, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for other in (copy.deepcopy(packed), loaded):
            assert type(other) is type(packed)
            for name, weight in dense.named_parameters():
                assert torch.equal(getattr(other, name) + 0, weight)


def test_a_packed_module_becomes_plain_again() -> None:
    dense, packed = packed_experts()
    for name in ("up", "down", "flat"):
        assert isinstance(packed, PackedModule)
        unpack_parameter(packed, name)
    assert type(packed) is Experts
    for name, weight in dense.named_parameters():
        assert torch.equal(packed.get_parameter(name), weight)


def test_a_blob_that_is_not_the_modules_is_refused_before_it_is_used() -> None:
    _, packed = linear()
    good = packed.get_parameter("packed").data
    for blob, said in (
        (
            encode_floats([sparse(70, 12)]),
            r"weight: It is \(70, 12\) where it is packed, \(12, 70\)",
        ),
        (torch.zeros(500, dtype=torch.uint8), "not a packed matrix"),
        (good[:-8], "cut off"),
    ):
        packed.get_parameter("packed").data = blob
        with pytest.raises(SympruneError, match=said):
            packed(torch.randn(70))
    damaged = good.clone()
    damaged[64 + 8 * 3 :][:64] = 255
    packed.get_parameter("packed").data = damaged
    with pytest.raises(SympruneError, match="damaged"):
        packed(torch.randn(70))


def test_packed_modules_run_on_an_accelerator() -> None:
    dense, packed = linear()
    experts, packed_ones = packed_experts()
    x = torch.randn(4, 70)
    with pretend_device.PretendDevice() as device:
        given = x.to(pretend_device.DEVICE)
        there = copy.deepcopy(packed).to(pretend_device.DEVICE)
        found = there(given).cpu()
        before = device.own_waits
        there(given)
        assert device.own_waits == before
        others = copy.deepcopy(packed_ones).to(pretend_device.DEVICE)
        routed = others(given, torch.tensor(1).to(pretend_device.DEVICE)).cpu()
    torch.testing.assert_close(found, dense(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(routed, experts(x, torch.tensor(1)), rtol=1e-4, atol=1e-4)
