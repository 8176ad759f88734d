"""How much each layer gives: exact totals, and the rules themselves."""

from __future__ import annotations

import itertools
from typing import Any

import families
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from symprune import Recipe, prune
from symprune.allocate.atp import atp
from symprune.allocate.budget import Layer
from symprune.allocate.by_error import by_error, sum_lowest
from symprune.allocate.lsa import half_error, lsa
from symprune.allocate.owl import owl
from symprune.engine import reduce
from symprune.engine.allocation import divide
from symprune.errors import SympruneError
from symprune.models.layout import find_layout
from symprune.stats import Needs


def layer(name: str, block: int, outliers: int = 0, price: float = 1.0) -> Layer:
    """8 x 100, half of it asked for; the price of a weight rises with how many are gone."""
    count = list(range(40, 61, 5))
    return Layer(name, block, 8, 100, 400, outliers, count, [price * c**2 for c in count])


def test_a_block_with_more_outliers_gives_less_and_the_total_is_exact() -> None:
    layers = [layer("a", 0, 40), layer("b", 1, 8), layer("c", 2, 8), layer("d", 2, 9)]
    counts = owl(layers, 0.5, 0.08)
    assert sum(counts.values()) == 1600
    assert counts["a"] < 400 < counts["b"]
    assert counts["c"] == pytest.approx(counts["d"], abs=4)
    assert all(abs(count / 800 - 0.5) <= 2 * 0.08 + 0.01 for count in counts.values())


def sized(name: str, block: int, rows: int, columns: int, outliers: int) -> Layer:
    return Layer(name, block, rows, columns, rows * columns // 2, outliers)


def test_blocks_of_unequal_size_share_what_is_missing_in_proportion() -> None:
    """One large block and many small ones: no matrix makes up for the others."""
    large = [sized("a", 0, 100, 1000, 2000), sized("b", 0, 50, 1000, 0)]
    small = [sized(f"c{n}", n, 10, 100, 5) for n in range(1, 9)]
    counts = owl([*large, *small], 0.5, 0.1)
    assert sum(counts.values()) == (150_000 + 8_000) // 2
    shares = {each.name: counts[each.name] / each.size for each in [*large, *small]}
    assert shares["a"] == pytest.approx(shares["b"], abs=1e-4)
    for each in small:
        assert shares[each.name] - shares["a"] == pytest.approx(0.2, abs=2e-3)


def test_what_a_layer_cannot_give_is_given_by_the_others() -> None:
    layers = [sized("a", 0, 10, 100, 900), sized("b", 1, 10, 100, 0), sized("c", 2, 20, 100, 0)]
    counts = owl(layers, 0.5, 0.7)  # 1.4 apart: no two sparsities are
    assert counts == {"a": 0, "b": 667, "c": 1333}


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 50), st.floats(0, 1)),
        min_size=1,
        max_size=8,
    ),
    st.floats(0, 0.95),
    st.floats(0.01, 0.99),
)
def test_any_sizes_lose_the_total_and_a_block_with_more_outliers_less(
    sizes: list[tuple[int, int, int, float]], sparsity: float, spread: float
) -> None:
    layers = [
        Layer(str(n), block, rows, columns, int(rows * columns * sparsity),
              int(share * rows * columns))
        for n, (block, rows, columns, share) in enumerate(sizes)
    ]  # fmt: skip
    counts = owl(layers, sparsity, spread)
    assert sum(counts.values()) == sum(each.removed for each in layers)
    assert all(0 <= counts[each.name] <= each.size for each in layers)

    def outliers(block: int) -> float:
        own = [each for each in layers if each.block == block]
        return sum(each.outliers for each in own) / sum(each.size for each in own)

    if len({outliers(each.block) for each in layers}) == 1:
        return  # equal shares, each rounded for itself
    for one, other in itertools.permutations(layers, 2):
        if outliers(one.block) >= outliers(other.block):  # a count is rounded by less than one
            more = counts[one.name] / one.size - counts[other.name] / other.size
            assert more <= 1 / one.size + 1 / other.size + 1e-9


def test_equal_outliers_mean_equal_shares() -> None:
    counts = owl([layer("a", 0, 5), layer("b", 1, 5)], 0.5, 0.08)
    assert counts == {"a": 400, "b": 400}


def part(name: str, block: int, which: str, error: float, rows: int = 8) -> Layer:
    return Layer(name, block, rows, 100, rows * 50, part=which, error=error)


def test_a_part_with_a_higher_error_gives_more_and_its_matrices_are_alike() -> None:
    layers = [
        part("q", 0, "attn", 1.0), part("o", 0, "attn", 3.0), part("up", 0, "mlp", 6.0),
        part("q2", 1, "attn", 4.0), part("o2", 1, "attn", 4.0), part("up2", 1, "mlp", 2.0),
    ]  # fmt: skip
    counts = lsa(layers, 0.5, 0.08)
    assert sum(counts.values()) == 2400
    for alike in (("q", "o", "up2"), ("q2", "o2")):  # but for the roundings
        own = [counts[name] for name in alike]
        assert max(own) - min(own) <= 1
    assert counts["q"] < counts["q2"] < counts["up"]
    assert (counts["up"] - counts["q"]) / 800 == pytest.approx(0.16, abs=2 / 800)
    turned = lsa(layers, 0.5, -0.08)
    assert turned["q"] > turned["q2"] > turned["up"] and sum(turned.values()) == 2400


def test_the_error_without_half_of_the_weights_is_that_of_a_sort() -> None:
    score = torch.rand(5, 31, generator=torch.Generator().manual_seed(0))
    lowest = score.sort(dim=1).values[:, :15]
    assert half_error(score) == pytest.approx(float(lowest.double().square().sum()), rel=1e-6)


def test_sparsities_rise_by_the_same_step_from_block_to_block() -> None:
    layers = [part(f"{block} {n}", block, "mlp", 0.0) for block in range(5) for n in range(2)]
    counts = atp(layers, 0.5, 0.1)
    assert [counts[f"{block} 1"] for block in range(5)] == [320, 360, 400, 440, 480]
    assert counts == {f"{block} {n}": 320 + 40 * block for block in range(5) for n in range(2)}
    assert list(atp(layers, 0.5, -0.1).values()) == list(counts.values())[::-1]


@pytest.mark.parametrize(("sparsity", "lowest", "highest"), [(0.3, 0.0, 0.6), (0.8, 0.6, 1.0)])
def test_no_block_is_asked_for_more_than_it_has_and_the_steps_stay_equal(
    sparsity: float, lowest: float, highest: float
) -> None:
    layers = [Layer(str(n), n, 10, 100, int(1000 * sparsity)) for n in range(5)]
    shares = [count / 1000 for count in atp(layers, sparsity, 0.9).values()]
    steps = [after - before for before, after in itertools.pairwise(shares)]
    assert shares[0] == pytest.approx(lowest) and shares[-1] == pytest.approx(highest)
    assert steps == pytest.approx([(highest - lowest) / 4] * 4)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(1, 50), st.floats(0, 9)),
        min_size=1,
        max_size=8,
    ),
    st.floats(0, 0.95),
    st.floats(-0.99, 0.99),
)
def test_any_sizes_lose_the_total_by_every_rule(
    sizes: list[tuple[int, int, int, float]], sparsity: float, spread: float
) -> None:
    layers = [
        Layer(str(n), block, rows, columns, int(rows * columns * sparsity),
              part="attn" if n % 2 else "mlp", error=error)
        for n, (block, rows, columns, error) in enumerate(sizes)
    ]  # fmt: skip
    for rule in (lsa, atp):
        counts = rule(layers, sparsity, spread)
        assert sum(counts.values()) == sum(each.removed for each in layers)
        assert all(0 <= counts[each.name] <= each.size for each in layers)


def test_the_budget_goes_where_it_costs_least() -> None:
    """Against every other division in the same steps."""
    layers = [layer("a", 0, price=1), layer("b", 0, price=3), layer("c", 1, price=9)]
    counts = by_error(layers)
    assert sum(counts.values()) == 1200 and counts["a"] > counts["b"] > counts["c"]

    def cost(chosen: tuple[int, ...]) -> float:
        return sum(each.price[each.count.index(c)] for each, c in zip(layers, chosen, strict=True))

    ours = cost(tuple(counts[each.name] // 8 for each in layers))
    steps = [c for c in itertools.product(*(each.count for each in layers)) if sum(c) == 150]
    assert ours == min(cost(chosen) for chosen in steps)


def test_sums_of_the_lowest_are_those_of_a_sort() -> None:
    values = torch.randint(0, 20, (7, 30), generator=torch.Generator().manual_seed(0)).float()
    ordered = values.sort(dim=1).values
    for count in (0, 1, 11, 29, 30):
        assert sum_lowest(values, [count]) == [float(ordered[:, :count].sum())]


@pytest.mark.parametrize("name", ["owl", "lsa", "atp", "error"])
@pytest.mark.parametrize("group", ["row", "layer"])
@pytest.mark.parametrize("step", [{}, {"refine": "swap", "update": "lsq"}, {"refine": "dsnot"}])
def test_a_model_loses_exactly_what_equal_shares_take(
    name: str, group: str, step: dict[str, object]
) -> None:
    recipe = Recipe(allocate=name, group=group, **step)  # type: ignore[arg-type]
    report = prune(families.model(), families.tokens(8, 32), recipe)
    assert report.removed == report.prunable // 2
    assert len({round(entry.sparsity, 3) for entry in report.layers}) > 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Needs]:
    """What was collected, a pass over a block each."""
    asked: list[Needs] = []
    collect = reduce.collect

    def watched(*arguments: Any, **named: Any) -> Any:
        asked.append(arguments[4])
        return collect(*arguments, **named)

    for module in (divide, reduce):
        monkeypatch.setattr(module, "collect", watched)
    return asked


@pytest.mark.parametrize("name", ["owl", "lsa", "error"])
def test_outputs_are_measured_only_for_the_rule_that_looks_at_them(
    name: str, asked: list[Needs]
) -> None:
    prune(families.model(), families.tokens(8, 32), Recipe(method="wanda", allocate=name))
    assert any(needs.outputs for needs in asked) == (name == "error")


def test_the_walk_collects_nothing_for_a_criterion_without_statistics(asked: list[Needs]) -> None:
    model = families.model()
    recipe = Recipe(method="magnitude", allocate="owl")
    report = prune(model, families.tokens(8, 32), recipe)
    assert len(asked) == len(find_layout(model).blocks)  # the allocation's pass alone
    assert report.removed == report.prunable // 2
    assert report.seconds["allocate"] > 0 and "collect" not in report.seconds


def test_a_progression_over_depth_needs_no_forward_and_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = families.model()
    monkeypatch.setattr(type(model), "forward", None)
    for block in find_layout(model).blocks:
        monkeypatch.setattr(type(block), "forward", None)
    report = prune(model, None, Recipe(method="magnitude", allocate="atp"))
    assert report.removed == report.prunable // 2
    assert len({entry.sparsity for entry in report.layers}) > 1


@pytest.mark.parametrize("name", ["owl", "lsa", "atp", "error"])
def test_allocation_has_nothing_to_say_about_a_pattern(name: str) -> None:
    with pytest.raises(SympruneError, match="leave out the allocation"):
        Recipe(pattern="2:4", allocate=name)
    for spread in (1.5, 0.0, -0.1):
        with pytest.raises(SympruneError, match="spread must lie between 0 and 1"):
            Recipe(allocate={"name": name, "spread": spread})


def test_uniform_is_no_allocation_and_an_unknown_one_is_refused() -> None:
    assert Recipe(allocate="uniform").allocate is None
    with pytest.raises(SympruneError, match="choose owl, lsa, atp, error, search"):
        Recipe(allocate="best")


def test_the_budget_goes_where_a_weight_costs_least_not_a_step() -> None:
    """A step of the wide layer costs 0.5 for ten weights, one of the narrow layer 0.1 for one."""
    wide = Layer("wide", 0, 10, 4, 5, count=[0, 1], price=[0.0, 0.5])
    narrow = Layer("narrow", 0, 1, 4, 5, count=[0, 1], price=[0.0, 0.1])
    assert by_error([wide, narrow]) == {"wide": 10, "narrow": 0}
