"""How often the host waits for an accelerator, and that what avoids waiting decides the same."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from pretend_device import DEVICE, OnDevice, PretendDevice
from torch import Tensor

import symprune
from symprune import MaskSet, Recipe, SympruneError, masks
from symprune.machine import host
from symprune.masks import Pattern
from symprune.refine import dsnot, swap
from symprune.stats import GRAM, MOMENTS, SQUARE, ChannelStats
from symprune.update.least_squares import least_squares
from symprune.update.sparsegpt import sparsegpt


def waits(recipe: Recipe, family: str = "llama", **options: Any) -> float:
    """The project's own waits for a matrix, in a whole run."""
    with PretendDevice() as device:
        model = device.take(families.model(family))
        report = symprune.prune(model, families.tokens(), recipe, **options)
    return device.own_waits / len(report.layers)


def scores(kind: str, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(rows, columns, generator=generator)
    if kind == "ties":
        return score.round()
    if kind == "constant":
        return torch.zeros_like(score).copysign(score)  # both zeros are equal
    if kind == "infinite":
        return score.masked_fill(score > 1, torch.inf).masked_fill(score < -1, -torch.inf)
    if kind == "tiny":
        return score * 1e-41
    return score.double() if kind == "double" else score.bfloat16() if kind == "half" else score


# How often the host waits


@pytest.mark.parametrize("method", ["magnitude", "wanda", "ria", "symwanda", "stochria"])
@pytest.mark.parametrize("amount", [{}, {"group": "layer"}, {"pattern": "2:4"}, {"pattern": "4:8"}])
def test_a_mask_takes_no_more_than_two_waits(method: str, amount: dict[str, str]) -> None:
    assert waits(Recipe(method=method, **amount)) <= 2


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_the_family_does_not_show_in_the_waits(family: str) -> None:
    assert waits(Recipe(method="wanda"), family) <= 2


def test_more_samples_are_no_more_waits() -> None:
    recipe = Recipe(method="wanda", refine="swap", update="lsq")
    seen = []
    for samples in (2, 6):
        with PretendDevice() as device:
            model = device.take(families.model())
            symprune.prune(model, families.tokens(samples), recipe)
        seen.append(device.own_waits)
    assert seen[0] == seen[1]


def layer(size: int = 32) -> tuple[Tensor, ChannelStats]:
    generator = torch.Generator().manual_seed(0)
    stats = ChannelStats(size, {SQUARE, MOMENTS, GRAM}, device=DEVICE)
    x = torch.randn(2, 64, size, generator=generator)
    stats.add((x + x.roll(1, 2) + 0.1).to(DEVICE))
    return torch.randn(size, size, generator=generator).to(DEVICE), stats


@pytest.mark.parametrize("pattern", [None, Pattern(2, 4)])
@pytest.mark.parametrize("step", ["dsnot", "r2-dsnot", "swap", "lsq"])
def test_loops_look_at_the_device_once_in_several_steps(step: str, pattern: Pattern | None) -> None:
    steps, keys = 64, dsnot.Keys(grow_relative=True, gamma2=1e-4)
    with PretendDevice() as device:
        weight, stats = layer()
        score = weight.abs()
        keep = (
            masks.keep_by_row(score, 0.5) if pattern is None else masks.keep_n_of_m(score, pattern)
        )
        gram = stats.gram
        device.waits.clear()
        if step == "swap":
            swap.swap(weight, keep, gram, max_swaps=steps, candidates=2, pattern=pattern)
        elif step == "lsq":
            least_squares(weight, keep, gram, iters=steps, tolerance=0)
        else:
            keys = keys if step == "r2-dsnot" else dsnot.Keys()
            options: dict[str, Any] = {"max_cycles": steps, "update_threshold": 0}
            dsnot.dsnot(weight, keep, stats, keys=keys, pattern=pattern, **options)
    assert device.own_waits <= steps / host.LOOK_EVERY + 1, device.waits


@pytest.mark.parametrize("pattern", [None, Pattern(2, 4)])
def test_sparsegpt_looks_once_whatever_the_number_of_blocks(pattern: Pattern | None) -> None:
    with PretendDevice() as device:
        weight, stats = layer()
        sparsegpt(weight, None, stats.gram, pattern=pattern, block=4)
    assert device.own_waits == 1, device.waits


def test_an_allocation_asks_once_for_each_matrix() -> None:
    for name in ("owl", "lsa", "atp", "error"):
        assert waits(Recipe(method="wanda", allocate=name)) <= 3


def test_the_host_does_not_wait_for_a_candidate_that_is_tried() -> None:
    """Two answers about each matrix, and the divergences all at once."""
    assert waits(Recipe(method="wanda", allocate="search")) <= 5


# What avoids waiting decides the same


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "kind", ["normal", "ties", "constant", "infinite", "tiny", "double", "half"]
)
def test_selection_on_the_device_is_that_on_the_cpu(kind: str, rows: int) -> None:
    score = scores(kind, rows, 41)
    for count in (0, 1, 20, 40, 41):
        expected = masks.drop_lowest(score, count)
        with PretendDevice():
            found = masks.drop_lowest(score.to(DEVICE), count).cpu()
            whole = masks.keep_count(score.to(DEVICE), rows * count, "layer").cpu()
        assert torch.equal(found, expected), count
        assert torch.equal(whole, masks.keep_count(score, rows * count, "layer")), count


@pytest.mark.parametrize("kind", ["normal", "ties", "infinite", "tiny", "double", "half"])
def test_one_long_row_is_selected_from_bit_by_bit(kind: str) -> None:
    score = scores(kind, 1, 300)[0]
    for k in (1, 2, 150, 299, 300):
        with PretendDevice():
            found = masks.kth_smallest(score.to(DEVICE), k).cpu()
        assert torch.equal(found, score.sort().values[k - 1]), k


def test_a_score_that_is_nan_is_refused_on_the_device() -> None:
    score = torch.tensor([[1.0, torch.nan, 2.0, 3.0]])
    with PretendDevice(), pytest.raises(SympruneError, match="NaN"):
        masks.drop_lowest(score.to(DEVICE), 2)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1001])
def test_bits_are_packed_on_the_device(size: int) -> None:
    mask = torch.rand(size, generator=torch.Generator().manual_seed(0)) < 0.5
    with PretendDevice() as device:
        packed = masks.pack_bits(mask.to(DEVICE))
        assert isinstance(packed, OnDevice) and not device.waits
        assert torch.equal(packed.cpu(), masks.pack_bits(mask))


def test_masks_on_the_device_are_brought_together() -> None:
    generator = torch.Generator().manual_seed(0)
    dense = {f"{n}": torch.rand(3, n, generator=generator) < 0.5 for n in (3, 8, 11)}
    with PretendDevice() as device:
        found = MaskSet()
        for name, mask in dense.items():
            found[name] = mask.to(DEVICE)
        assert not device.waits
        for name, mask in dense.items():
            assert torch.equal(found[name], mask)
    assert sum(device.waits.values()) == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_block_with_a_weight_that_is_no_number_is_refused_unchanged(value: float) -> None:
    model = families.model()
    last = model.model.layers[0].mlp.down_proj.weight
    last.data[0, 0] = value
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(
        SympruneError, match=r"0\.mlp\.down_proj\.weight has NaN or infinite weights"
    ):
        symprune.prune(model, families.tokens(), Recipe(method="magnitude"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.nan_to_num(), before[name].nan_to_num()), name


@pytest.mark.parametrize("same_sign", [False, True])
@pytest.mark.parametrize("accept", ["published", "improving"])
@pytest.mark.parametrize("pattern", [None, Pattern(2, 4)])
def test_exchanges_end_where_they_end_on_the_cpu(
    pattern: Pattern | None, accept: str, same_sign: bool
) -> None:
    """Rounded to quarters, so that many candidates are equal."""
    with PretendDevice():
        weight, stats = layer()
        weight = (4 * weight).round() / 4
        plain = ChannelStats(stats.channels, stats.collect)
        plain.load({name: value.cpu() for name, value in stats.state().items()})
        score = weight.abs()
        keep = (
            masks.keep_by_row(score, 0.5) if pattern is None else masks.keep_n_of_m(score, pattern)
        )
        options: dict[str, Any] = {"accept": accept, "same_sign": same_sign, "pattern": pattern}
        found = dsnot.dsnot(weight, keep, stats, **options).cpu()
        weight, keep = weight.cpu(), keep.cpu()
    assert torch.equal(found, dsnot.dsnot(weight, keep, plain, **options))


@pytest.mark.parametrize("kept", [1, 16, 31])
def test_swaps_with_few_to_choose_from_end_where_they_end_on_the_cpu(kept: int) -> None:
    """Where fewer can be grown or pruned than are looked at, the lists of both overlap."""
    with PretendDevice():
        weight, stats = layer()
        keep = masks.keep_largest(weight.abs(), kept)
        found = swap.swap(weight, keep, stats.gram, max_swaps=40).cpu()
        weight, keep, gram = weight.cpu(), keep.cpu(), stats.gram.cpu()
    assert (found.sum(1) == kept).all()
    assert torch.equal(found, swap.swap(weight, keep, gram, max_swaps=40))
