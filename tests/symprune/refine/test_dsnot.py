"""DSnoT and R2-DSnoT: a plain transcription, what the reference gets wrong, and what gamma does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from symprune import masks
from symprune.masks import Pattern
from symprune.refine import dsnot


@dataclass
class Stats:
    """Statistics made up for a test."""

    norm: Tensor
    mean: Tensor
    variance: Tensor


def problem(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Stats]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    stats = Stats(
        torch.rand(columns, generator=generator) + 0.5,
        torch.randn(columns, generator=generator),
        torch.rand(columns, generator=generator) + 0.1,
    )
    return weight, stats


def expected_error(weight: Tensor, keep: Tensor, stats: Stats) -> Tensor:
    return (weight * ~keep) @ stats.mean


def plain_dsnot(
    weight: Tensor,
    keep: Tensor,
    stats: Stats,
    cycles: int,
    threshold: float,
    same_sign: bool = False,
    improving: bool = False,
) -> Tensor:
    """The algorithm one row and one cycle at a time, with full sorts and two pointers."""
    result = keep.clone()
    for row in range(len(weight)):
        w, kept = weight[row].double(), keep[row]
        c = w * stats.mean.double()
        e = float(c[~kept].sum())
        initial = math.copysign(1, e) if e else 0
        pruned = [i for i in range(len(w)) if not kept[i]]
        order = sorted(pruned, key=lambda i: float(c[i] / stats.variance[i]))
        cheap = sorted((i for i in range(len(w)) if kept[i]),
                       key=lambda i: float(w[i].abs() * stats.norm[i]))  # fmt: skip
        low, high = 0, len(order) - 1
        taken: dict[bool, int] = {True: 0, False: 0}
        for _ in range(cycles):
            if abs(e) <= threshold:
                break
            if low > high:
                break
            g = order[high] if e > 0 else order[low]
            wrong_sign = [i for i in cheap if (c[i] < 0 if e > 0 else c[i] > 0)]
            if (c[g] <= 0 if e > 0 else c[g] >= 0) or taken[e > 0] >= len(wrong_sign):
                break
            q = wrong_sign[taken[e > 0]]
            taken[e > 0] += 1
            low, high = (low, high - 1) if e > 0 else (low + 1, high)
            after = e + float(c[q]) - float(c[g])
            if same_sign and math.copysign(1, after) != initial:
                break
            if improving and abs(after) >= abs(e):
                continue
            result[row, g], result[row, q] = True, False
            e = after
    return result


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", ["published", "improving", "same-sign"])
def test_masks_are_those_of_the_plain_transcription(seed: int, rule: str) -> None:
    """Which sums in double precision: no two of so few keys are closer than a rounding."""
    weight, stats = problem(12, 64, seed)
    keep = masks.keep_by_row(weight.abs() * stats.norm, 0.5)
    expected = plain_dsnot(
        weight, keep, stats, 20, 0.1, same_sign=rule == "same-sign", improving=rule == "improving"
    )
    got = dsnot.dsnot(
        weight,
        keep,
        stats,
        max_cycles=20,
        same_sign=rule == "same-sign",
        accept="improving" if rule == "improving" else "published",
    )
    assert torch.equal(got, expected)
    assert not torch.equal(got, keep)


@settings(deadline=None)
@given(
    st.integers(1, 5),
    st.sampled_from([4, 8, 16, 32]),
    st.floats(0, 0.99),
    st.sampled_from(["published", "improving"]),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_every_row_keeps_as_many_as_before(
    rows: int, columns: int, sparsity: float, accept: str, same_sign: bool, seed: int
) -> None:
    """Narrow rows, rows without candidates of the needed sign, any sparsity: counts stay."""
    weight, stats = problem(rows, columns, seed)
    keys = dsnot.Keys(grow_relative=seed % 2 == 0, prune_relative=seed % 3 == 0, gamma2=0.01)
    keep = masks.keep_by_layer(weight.abs(), sparsity)
    got = dsnot.dsnot(weight, keep, stats, keys=keys, accept=accept, same_sign=same_sign)
    assert torch.equal(got.sum(1), keep.sum(1))


@settings(deadline=None)
@given(st.sampled_from(["2:4", "1:4", "4:8"]), st.integers(0, 10_000), st.booleans())
def test_patterns_hold_after_refinement(text: str, seed: int, relative: bool) -> None:
    weight, stats = problem(6, 32, seed)
    pattern = Pattern.parse(text)
    keep = masks.keep_n_of_m(weight.abs() * stats.norm, pattern)
    keys = dsnot.Keys(prune_relative=relative, gamma2=0.1 if relative else 0.0)
    got = dsnot.dsnot(weight, keep, stats, keys=keys, pattern=pattern)
    assert (got.view(-1, pattern.m).sum(1) == pattern.n).all()


def test_a_pattern_exchanges_inside_the_group_of_what_was_grown() -> None:
    weight = torch.tensor([[4.0, -3.0, 2.0, 1.0, 5.0, 6.0, 0.1, 0.2]])
    stats = Stats(torch.ones(8), torch.ones(8), torch.ones(8))
    keep = torch.tensor([[False, True, True, False, True, True, False, False]])
    # e = 4 + 1 + 0.3 > 0; growing 4 helps, and -3 is the only kept weight of the needed sign.
    got = dsnot.dsnot(weight, keep, stats, pattern=Pattern(2, 4), max_cycles=1)
    assert got.tolist() == [[True, False, True, False, True, True, False, False]]


def test_a_row_without_candidates_of_the_needed_sign_stops() -> None:
    """Every contribution is positive: nothing can be pruned that would help, so nothing moves."""
    weight = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    stats = Stats(torch.ones(4), torch.ones(4), torch.ones(4))
    keep = torch.tensor([[True, True, False, False]])
    assert torch.equal(dsnot.dsnot(weight, keep, stats), keep)


def test_contributions_of_zero_are_no_candidates() -> None:
    weight = torch.tensor([[9.0, -8.0, 0.5, 7.0, 1.0]])
    mean = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    stats = Stats(torch.ones(5), mean, torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]))
    keep = torch.tensor([[False, True, False, True, False]])
    # -8 and 9 may be exchanged; 7 (kept) and 1 (pruned) contribute nothing and stay where they are.
    got = dsnot.dsnot(weight, keep, stats)
    assert got[0, 3] and not got[0, 4]
    assert got.sum() == keep.sum() and not torch.equal(got, keep)


def test_a_channel_of_zero_variance_divides_nothing_by_zero() -> None:
    weight, stats = problem(8, 32)
    stats.variance[::3] = 0
    keep = masks.keep_by_row(weight.abs() * stats.norm, 0.5)
    got = dsnot.dsnot(weight, keep, stats, accept="improving")
    assert torch.equal(got.sum(1), keep.sum(1))
    before, after = (expected_error(weight, m, stats).abs() for m in (keep, got))
    assert torch.isfinite(after).all() and (after <= before).all()


def test_improving_never_makes_the_expected_error_larger() -> None:
    weight, stats = problem(50, 128)
    keep = masks.keep_by_row(weight.abs() * stats.norm, 0.6)
    got = dsnot.dsnot(weight, keep, stats, accept="improving")
    before, after = (expected_error(weight, m, stats).abs() for m in (keep, got))
    assert (after <= before + 1e-4).all() and after.mean() < before.mean() / 5


def test_a_row_below_the_threshold_is_left_alone() -> None:
    weight, stats = problem(10, 32)
    keep = masks.keep_by_row(weight.abs() * stats.norm, 0.5)
    assert torch.equal(dsnot.dsnot(weight, keep, stats, update_threshold=1e9), keep)


def test_the_literal_regulariser_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eq. 6.5/6.6 as printed add gamma ||W~_o||_p, one number per row, to every candidate."""
    weight, stats = problem(20, 64)
    keep = masks.keep_by_row(weight.abs() * stats.norm, 0.5)

    def literal(weight: Tensor, keep: Tensor, p: float, grow: bool) -> Tensor:
        return torch.linalg.vector_norm(weight * keep, ord=p, dim=1, keepdim=True)

    def refined(gamma: float) -> Tensor:
        return dsnot.dsnot(weight, keep, stats, keys=dsnot.Keys(gamma1=gamma, gamma2=gamma))

    after_the_exchange = refined(5.0)
    monkeypatch.setattr(dsnot, "norm_after", literal)
    assert torch.equal(refined(5.0), refined(0.0))
    assert not torch.equal(after_the_exchange, refined(0.0))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("columns", [1, 2, 10])
def test_the_norm_after_an_exchange_is_that_of_the_changed_row(p: float, columns: int) -> None:
    weight, _ = problem(3, columns)
    keep = masks.keep_by_row(weight.abs(), 0.4)
    for grow in (True, False):
        got = dsnot.norm_after(weight, keep, p, grow)
        for row in range(3):
            for column in range(columns):
                if bool(keep[row, column]) != grow:
                    changed = keep[row].clone()
                    changed[column] = grow
                    expected = torch.linalg.vector_norm(weight[row] * changed, ord=p)
                    torch.testing.assert_close(got[row, column], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_a_single_column_has_nothing_to_exchange(p: float) -> None:
    weight, stats = problem(5, 1)
    keep = torch.tensor([[True], [False], [True], [False], [True]])
    keys = dsnot.Keys(gamma1=0.1, gamma2=0.1, norm_p=p)
    assert torch.equal(dsnot.dsnot(weight, keep, stats, keys=keys), keep)


def test_relative_importance_enters_growing_or_pruning_or_both() -> None:
    weight, stats = problem(30, 64)
    weight[:, ::2] *= 5
    keep = masks.keep_by_row(weight.abs() * stats.norm, 0.5)
    results = [
        dsnot.dsnot(weight, keep, stats, keys=dsnot.Keys(grow_relative=g, prune_relative=p))
        for g in (False, True)
        for p in (False, True)
    ]
    for place, one in enumerate(results):
        assert all(not torch.equal(one, other) for other in results[:place])
    literal = dsnot.Keys(grow_relative=True, literal_growth=True)
    assert not torch.equal(dsnot.dsnot(weight, keep, stats, keys=literal), results[2])


def test_equal_keys_are_taken_by_index() -> None:
    key = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    columns, length = dsnot._select_first(key, 3)
    assert columns.tolist() == [[1, 2, 3], [5, 4, 3]] and length.tolist() == [3, 3]
    nothing = torch.full((1, 4), -torch.inf)
    assert dsnot._select_first(nothing, 3)[1].tolist() == [0]


def test_devices_agree(device: torch.device) -> None:
    """On masks: no two of so few keys are closer than a rounding."""
    weight, stats = problem(16, 64)
    keep = masks.keep_by_row(weight.abs() * stats.norm, 0.5)
    there = Stats(*(value.to(device) for value in (stats.norm, stats.mean, stats.variance)))
    got = dsnot.dsnot(weight.to(device), keep.to(device), there)
    assert torch.equal(got.cpu(), dsnot.dsnot(weight, keep, stats))


ALL_KEYS = {
    "plain": dsnot.Keys(),
    "power of the variance": dsnot.Keys(var_power=-2.0),
    "relative growing": dsnot.Keys(grow_relative=True),
    "literal growing": dsnot.Keys(grow_relative=True, literal_growth=True),
    "relative pruning": dsnot.Keys(prune_relative=True, alpha=0.5),
    "regularised growing": dsnot.Keys(gamma1=30.0),
    "regularised pruning": dsnot.Keys(gamma2=30.0, norm_p=3.0),
}


@pytest.mark.parametrize("name", ALL_KEYS)
def test_the_first_exchange_is_the_one_that_the_formula_puts_first(name: str) -> None:
    """Eq. 6.5 and 6.6, candidate by candidate, in double precision."""
    keys, (weight, stats) = ALL_KEYS[name], problem(24, 32)
    keep = masks.keep_by_row(weight.abs() * stats.norm, 0.5)
    got = dsnot.dsnot(weight, keep, stats, keys=keys, max_cycles=1, update_threshold=0.0)
    kept = (weight * keep).double().abs()
    for row in range(len(weight)):
        w, m, v, x = (t.double() for t in (weight[row], stats.mean, stats.variance, stats.norm))
        sign = math.copysign(1, float((w * m)[~keep[row]].sum()))
        importance = 1 / kept[row].sum() + 1 / kept.sum(0)

        def norm(changed: int, row: int = row, w: Tensor = w) -> float:
            """Of the row's kept weights once this one is grown or pruned."""
            after = kept[row].clone()
            after[changed] = 0.0 if keep[row, changed] else w[changed].abs()
            return float(torch.linalg.vector_norm(after, ord=keys.norm_p))

        grow = (m if keys.literal_growth else w * m) * sign / v**keys.var_power
        grow = grow * importance if keys.grow_relative else grow
        prune = w.abs() * x ** (keys.alpha if keys.prune_relative else 1.0)
        prune = prune * importance if keys.prune_relative else prune
        helps = sign * w * m
        to_grow = [i for i in range(32) if not keep[row, i] and helps[i] > 0]
        to_prune = [i for i in range(32) if keep[row, i] and helps[i] < 0]
        expected = keep[row].clone()
        if to_grow and to_prune:
            g = max(to_grow, key=lambda i: float(grow[i]) + keys.gamma1 * norm(i))
            q = min(to_prune, key=lambda i: float(prune[i]) + keys.gamma2 * norm(i))
            expected[g], expected[q] = True, False
        assert torch.equal(got[row], expected)
    assert not torch.equal(got, keep)
