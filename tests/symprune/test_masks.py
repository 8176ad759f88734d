"""Keep-masks against the obvious: a stable sort, whose lowest entries go."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from symprune import masks
from symprune.errors import SympruneError
from symprune.masks import Pattern


def sorted_keep(score: Tensor, count: int) -> Tensor:
    """The slow, obvious reference."""
    keep = torch.ones_like(score, dtype=torch.bool)
    keep.scatter_(-1, torch.argsort(score, dim=-1, stable=True)[..., :count], False)
    return keep


@st.composite
def scores_with_ties(draw: st.DrawFn, columns: int | None = None) -> Tensor:
    rows = draw(st.integers(1, 6))
    columns = columns or draw(st.integers(1, 12))
    few = st.integers(0, 4)
    values = draw(st.lists(few, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values, dtype=torch.float32).view(rows, columns)


@given(scores_with_ties(), st.data())
def test_the_lowest_go_and_equals_go_by_index(score: Tensor, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, score.shape[1]))
    assert torch.equal(masks.drop_lowest(score, count), sorted_keep(score, count))


@given(scores_with_ties(), st.floats(0, 0.999))
def test_counts_are_exact_for_rows_and_layers(score: Tensor, sparsity: float) -> None:
    by_row = masks.keep_by_row(score, sparsity)
    assert (~by_row).sum(1).tolist() == [masks.count_removed(score.shape[1], sparsity)] * len(score)
    by_layer = masks.keep_by_layer(score, sparsity)
    assert int((~by_layer).sum()) == masks.count_removed(score.numel(), sparsity)
    flat = sorted_keep(score.flatten(), masks.count_removed(score.numel(), sparsity))
    assert torch.equal(by_layer, flat.view(score.shape))


@given(scores_with_ties(columns=40), st.sampled_from(["2:4", "1:4", "4:8", "3:5", "7:20"]))
def test_n_of_m_keeps_the_highest_of_every_group(score: Tensor, text: str) -> None:
    pattern = Pattern.parse(text)
    groups = score.view(-1, pattern.m)
    expected = sorted_keep(groups, pattern.m - pattern.n).view(score.shape)
    assert torch.equal(masks.keep_n_of_m(score, pattern), expected)


@given(scores_with_ties(), st.data())
def test_keep_largest_keeps_as_many_as_asked(score: Tensor, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, score.shape[1]))
    keep = masks.keep_largest(score, count)
    assert (keep.sum(1) == count).all()
    for values, kept in zip(score, keep, strict=True):
        if 0 < count < len(values):
            assert values[kept].min() >= values[~kept].max()


@given(st.integers(1, 70), st.integers(0, 2**31))
def test_packing_and_unpacking_is_the_identity(size: int, seed: int) -> None:
    mask = torch.rand(3, size, generator=torch.Generator().manual_seed(seed)) < 0.5
    bits = masks.pack_bits(mask)
    assert bits.numel() == (3 * size + 7) // 8
    assert torch.equal(masks.unpack_bits(bits, mask.shape), mask)


def test_devices_agree(device: torch.device) -> None:
    """To the bit: scores are compared, never computed with."""
    score = torch.randint(0, 50, (33, 64), generator=torch.Generator().manual_seed(1)).float()
    for make in (
        lambda s: masks.keep_by_row(s, 0.37),
        lambda s: masks.keep_by_layer(s, 0.37),
        lambda s: masks.keep_n_of_m(s, Pattern(2, 4)),
    ):
        assert torch.equal(make(score.to(device)).cpu(), make(score))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_select_the_same_way(dtype: torch.dtype) -> None:
    score = torch.randint(0, 9, (5, 16)).to(dtype)
    assert torch.equal(masks.drop_lowest(score, 7), sorted_keep(score, 7))


def test_a_sparsity_means_the_decimal_that_was_typed() -> None:
    assert masks.count_removed(100, 0.29) == 29 and int(100 * 0.29) == 28
    assert masks.count_removed(7, 0.5) == 3


def test_a_pattern_is_found_again() -> None:
    score = torch.rand(8, 16)
    assert masks.find_pattern(masks.keep_n_of_m(score, Pattern(2, 4))) == "2:4"
    assert masks.find_pattern(masks.keep_n_of_m(score, Pattern(4, 8))) in ("4:8", "2:4")
    assert masks.find_pattern(masks.keep_by_row(torch.arange(16.0).expand(8, 16), 0.5)) is None


@pytest.mark.parametrize("pattern", [Pattern(2, 4), Pattern(1, 20)])
def test_infinite_scores_have_an_order(pattern: Pattern) -> None:
    score = torch.rand(2, 40)
    score[0, :3], score[1, 5:8] = torch.inf, -torch.inf
    groups = score.view(-1, pattern.m)
    expected = sorted_keep(groups, pattern.m - pattern.n).view(score.shape)
    assert torch.equal(masks.keep_n_of_m(score, pattern), expected)


@pytest.mark.parametrize("bad", ["2", "a:b", "4:2", "0:4", "2:2", "2:4:8"])
def test_a_bad_pattern_is_named(bad: str) -> None:
    with pytest.raises(SympruneError, match=bad):
        Pattern.parse(bad)


def test_bad_input_is_refused() -> None:
    score = torch.rand(4, 6)
    with pytest.raises(SympruneError, match="does not divide"):
        masks.keep_n_of_m(score, Pattern(2, 4))
    with pytest.raises(SympruneError, match="outside"):
        masks.keep_by_row(score, 1.0)
    with pytest.raises(SympruneError, match="NaN"):
        masks.drop_lowest(score * torch.nan, 2)
    for pattern in (Pattern(2, 3), Pattern(1, 20)):
        broken = torch.rand(3, 60)
        broken[1, 7] = torch.nan
        with pytest.raises(SympruneError, match="NaN"):
            masks.keep_n_of_m(broken, pattern)
    with pytest.raises(SympruneError, match="7 largest of 6"):
        masks.keep_largest(score, 7)
    with pytest.raises(SympruneError, match="bytes"):
        masks.unpack_bits(torch.zeros(3, dtype=torch.uint8), (5, 5))
    with pytest.raises(SympruneError, match="group"):
        masks.keep_mask(score, 0.5, group="column")
