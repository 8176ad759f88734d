"""Criteria against the thesis: plain transcriptions, identities, and the objective itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from symprune import criteria, scores
from symprune.errors import SympruneError

OUT, IN = 5, 7


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(OUT, IN, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def norms() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "input_norm": torch.rand(IN, generator=generator) + 0.1,
        "output_norm": torch.rand(OUT, generator=generator) + 0.1,
        "regional_gradient": torch.rand(OUT, IN, generator=generator),
    }


def entry_by_entry(weight: Tensor, formula: Callable[[float, int, int], float]) -> Tensor:
    """A score computed one weight at a time, in Python numbers."""
    rows, columns = weight.shape
    return torch.tensor(
        [[formula(abs(float(weight[o, i])), o, i) for i in range(columns)] for o in range(rows)]
    )


def total(values: Tensor, p: float = 1) -> float:
    """The p-norm of a vector, spelled out."""
    magnitudes = [abs(float(v)) for v in values]
    if p == 0:
        return float(sum(m != 0 for m in magnitudes))
    if p == math.inf:
        return max(magnitudes)
    return sum(m**p for m in magnitudes) ** (1 / p)


def test_every_formula_is_what_the_table_says(weight: Tensor, norms: dict[str, Tensor]) -> None:
    x, y = norms["input_norm"].tolist(), norms["output_norm"].tolist()
    g = norms["regional_gradient"].tolist()
    r = [total(weight[o]) for o in range(OUT)]
    c = [total(weight[:, i]) for i in range(IN)]
    r2 = [total(weight[o], 2) for o in range(OUT)]
    c2 = [total(weight[:, i], 2) for i in range(IN)]
    table: list[tuple[str, dict[str, object], Callable[[float, int, int], float]]] = [
        ("magnitude", {}, lambda w, o, i: w),
        ("wanda-plus-plus", {}, lambda w, o, i: w * (100 * g[o][i] + x[i])),
        ("wanda-plus-plus", {"strength": 0.5}, lambda w, o, i: w * (0.5 * g[o][i] + x[i])),
        ("wanda", {}, lambda w, o, i: w * x[i]),
        ("wanda", {"alpha": 2}, lambda w, o, i: w * x[i] ** 2),
        ("owanda", {"alpha": 0.5}, lambda w, o, i: w * y[o] ** 0.5),
        ("symwanda-general", {}, lambda w, o, i: w * (x[i] + y[o])),
        ("symwanda-general", {"squared": True}, lambda w, o, i: w * math.hypot(x[i], y[o])),
        (
            "symwanda-general",
            {"alpha": 0.5, "beta": 2},
            lambda w, o, i: w * (x[i] ** 0.5 + y[o] ** 2),
        ),
        (
            "symwanda-general",
            {"balance": 3.0},
            lambda w, o, i: w * (x[i] * IN / sum(x) + 3 * y[o] * OUT / sum(y)),
        ),
        (
            "symwanda",
            {"alpha": 0.5, "beta": 2},
            lambda w, o, i: w * (x[i] ** 0.5 / c[i] + y[o] ** 2 / r[o]),
        ),
        ("symwanda", {"squared": True}, lambda w, o, i: w * math.hypot(x[i] / c[i], y[o] / r[o])),
        ("symmetric", {}, lambda w, o, i: w * (c2[i] + r2[o])),
        ("symmetric", {"squared": True}, lambda w, o, i: w * math.hypot(c2[i], r2[o])),
        ("ri", {}, lambda w, o, i: w / c[i] + w / r[o]),
        ("ria", {}, lambda w, o, i: (w / c[i] + w / r[o]) * x[i] ** 0.5),
        ("row-sum", {"alpha": 1}, lambda w, o, i: w / c[i] * x[i]),
        ("col-sum", {"alpha": 1}, lambda w, o, i: w / r[o] * x[i]),
    ]
    for name, params, formula in table:
        expected = entry_by_entry(weight, formula)
        got = criteria.get(name)(weight, norms, params)
        torch.testing.assert_close(got, expected, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("p", [0, 1, 2, 3, 4, math.inf])
def test_lp_norms_and_strategies(weight: Tensor, norms: dict[str, Tensor], p: float) -> None:
    weight[0, 0] = 0.0
    x = norms["input_norm"].tolist()
    r = [total(weight[o], p) for o in range(OUT)]
    c = [total(weight[:, i], p) for i in range(IN)]
    strategies: dict[str, Callable[[float, int, int], float]] = {
        "s1": lambda w, o, i: w * (1 / c[i] + 1 / r[o]) * x[i],
        "s2": lambda w, o, i: w / (c[i] + r[o]) * x[i],
        "s3": lambda w, o, i: w * (c[i] + r[o]) * x[i],
        "s4": lambda w, o, i: w / (1 / c[i] + 1 / r[o]) * x[i],
    }
    for strategy, formula in strategies.items():
        got = criteria.get("lp")(weight, norms, {"p": p, "strategy": strategy, "alpha": 1})
        torch.testing.assert_close(got, entry_by_entry(weight, formula))


@pytest.mark.parametrize("name", criteria.available())
def test_the_rows_taken_at_once_do_not_show(
    name: str, weight: Tensor, norms: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a bit: norms are of the whole matrix, and what is done in parts is done to each entry
    alone, by operations that IEEE 754 rounds in one way only."""
    before, found = weight.clone(), []
    for at_once in (1, 2 * IN, scores.AT_ONCE):
        monkeypatch.setattr(scores, "AT_ONCE", at_once)
        statistics = {**norms, "generator": torch.Generator().manual_seed(0)}
        found.append(criteria.get(name)(weight, statistics))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])
    assert torch.equal(weight, before)


def objective(x: Tensor, weight: Tensor, pruned: Tensor, y: Tensor) -> Tensor:
    """(Sym): ||X (W~ - W)||_F + ||(W~ - W) Y||_F, with W as the thesis has it, `[in, out]`."""
    change = (pruned - weight).T
    return torch.linalg.norm(x @ change) + torch.linalg.norm(change @ y)


def test_a_score_is_the_cost_of_removing_that_weight(weight: Tensor) -> None:
    x, y = torch.randn(9, IN), torch.randn(OUT, 11)
    norms = {"input_norm": x.norm(dim=0), "output_norm": y.norm(dim=1)}
    score = criteria.get("symwanda-general")(weight, norms)
    for o in range(OUT):
        for i in range(IN):
            pruned = weight.clone()
            pruned[o, i] = 0
            torch.testing.assert_close(score[o, i], objective(x, weight, pruned, y))


def from_matrices(weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """|W| (||X_:i|| + ||Y_o:||) for explicit X `[a, in]` and Y `[out, d]` (Lemma 6.3.1)."""
    return weight.abs() * (x.norm(dim=0) + y.norm(dim=1, keepdim=True))


def test_the_constructions_of_the_thesis_give_its_criteria(
    weight: Tensor, norms: dict[str, Tensor]
) -> None:
    r, c = weight.abs().sum(1), weight.abs().sum(0)
    ri = criteria.get("ri")(weight, {})
    # Theorem 6.3.5, first construction: constant columns and rows; second: diagonal matrices.
    v1_x = torch.ones(IN, IN) / (math.sqrt(IN) * c)
    v1_y = torch.ones(OUT, OUT) / (math.sqrt(OUT) * r[:, None])
    torch.testing.assert_close(from_matrices(weight, v1_x, v1_y), ri)
    torch.testing.assert_close(from_matrices(weight, torch.diag(1 / c), torch.diag(1 / r)), ri)
    # Lemma 6.3.7: A D_X and D_Y B.
    a, b = torch.randn(6, IN), torch.randn(OUT, 4)
    both = {"input_norm": a.norm(dim=0), "output_norm": b.norm(dim=1)}
    torch.testing.assert_close(
        from_matrices(weight, a @ torch.diag(1 / c), torch.diag(1 / r) @ b),
        criteria.get("symwanda")(weight, both),
    )
    # Lemma 6.3.8 and 6.3.9: any unit vector scaled by the inverse p-norm.
    for p in (1.0, 2.0, 3.0):
        u = torch.nn.functional.normalize(torch.randn(8), dim=0)
        v = torch.nn.functional.normalize(torch.randn(8), dim=0)
        x = u[:, None] / torch.linalg.vector_norm(weight, ord=p, dim=0)
        y = v / torch.linalg.vector_norm(weight, ord=p, dim=1, keepdim=True)
        torch.testing.assert_close(
            from_matrices(weight, x, y), criteria.get("lp")(weight, norms, {"p": p, "alpha": 0})
        )
    # Lemma 6.3.6: for one weight, single entries carry both the relative importance and x.
    j, k, alpha = 2, 3, 0.5
    strength = norms["input_norm"][j] ** alpha
    x, y = torch.zeros(4, IN), torch.zeros(OUT, 4)
    x[1, j], y[k, 2] = strength / c[j], strength / r[k]
    torch.testing.assert_close(
        from_matrices(weight, x, y)[k, j], criteria.get("ria")(weight, norms)[k, j]
    )


def test_special_cases_are_one_another(weight: Tensor, norms: dict[str, Tensor]) -> None:
    score = {n: criteria.get(n)(weight, norms) for n in ("wanda", "owanda", "ria")}
    no_y = {**norms, "output_norm": torch.zeros(OUT)}
    no_x = {**norms, "input_norm": torch.zeros(IN)}
    general = criteria.get("symwanda-general")
    torch.testing.assert_close(general(weight, no_y), score["wanda"])
    torch.testing.assert_close(general(weight, no_x), score["owanda"])
    torch.testing.assert_close(criteria.get("lp")(weight, norms, {"p": 1}), score["ria"])
    torch.testing.assert_close(
        criteria.get("lp")(weight, norms, {"alpha": 0}), criteria.get("ri")(weight, {})
    )


@pytest.mark.parametrize("sampling", ["independent", "shared"])
def test_stochria_that_samples_everything_is_ria(sampling: str) -> None:
    square = torch.randn(6, 6)
    norms = {"input_norm": torch.rand(6), "generator": torch.Generator().manual_seed(0)}
    full = criteria.get("stochria")(square, norms, {"beta": 1, "sampling": sampling})
    torch.testing.assert_close(full, criteria.get("ria")(square, norms))


@pytest.mark.parametrize("sampling", ["independent", "shared"])
def test_stochria_sums_exactly_tau_entries(sampling: str) -> None:
    """With equal weights of one, every sampled l1 norm is tau."""
    ones = torch.ones(20, 30)
    norms = {"input_norm": torch.ones(30), "generator": torch.Generator().manual_seed(0)}
    score = criteria.get("stochria")(ones, norms, {"beta": 0.25, "sampling": sampling})
    torch.testing.assert_close(score, torch.full((20, 30), 2 / 5))


@pytest.mark.parametrize("tau", [1, 2, 3, 4])
def test_every_subset_is_equally_likely(tau: int) -> None:
    digits = torch.tensor([[1.0, 10.0, 100.0, 1000.0, 10000.0]]).expand(20000, 5)
    sums = scores._sum_sampled(digits, tau, torch.Generator().manual_seed(0))
    found, counts = sums.unique(return_counts=True)
    subsets = {float(sum(s)) for s in itertools.combinations(digits[0].tolist(), tau)}
    assert set(found.tolist()) == subsets
    expected = 20000 / len(subsets)
    assert float(((counts - expected) ** 2 / expected).sum()) < 27.9  # chi^2(9), 0.1 %


def test_stochria_is_seeded(weight: Tensor, norms: dict[str, Tensor]) -> None:
    """To the bit: the same draws, added in the same order."""

    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return criteria.get("stochria")(weight, {**norms, "generator": generator}, {"beta": 0.5})

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))


def test_balance_makes_the_scale_of_an_output_irrelevant(
    weight: Tensor, norms: dict[str, Tensor]
) -> None:
    louder = {**norms, "output_norm": 1000 * norms["output_norm"]}
    for name in ("symwanda", "symwanda-general"):
        balanced = {"balance": 0.5}
        score = criteria.get(name)
        torch.testing.assert_close(score(weight, norms, balanced), score(weight, louder, balanced))
        assert not torch.allclose(score(weight, norms), score(weight, louder))


@given(st.sampled_from(sorted(criteria.available())), st.integers(0, 1000))
def test_dead_channels_score_zero_and_nothing_is_nan(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 8, generator=generator)
    weight[2], weight[:, 5] = 0, 0
    norms = {
        "input_norm": torch.rand(8, generator=generator),
        "output_norm": torch.rand(6, generator=generator),
        "regional_gradient": torch.rand(6, 8, generator=generator),
        "generator": generator,
    }
    norms["input_norm"][1] = 0
    score = criteria.get(name)(weight, norms)
    assert torch.isfinite(score).all() and (score >= 0).all()
    assert (score[2] == 0).all() and (score[:, 5] == 0).all()
    all_dead = criteria.get(name)(torch.zeros(6, 8), norms)
    assert (all_dead == 0).all()


def test_scores_are_fp32_and_agree_on_every_device(device: torch.device) -> None:
    weight = torch.randn(6, 8).to(torch.bfloat16)
    norms = {"input_norm": torch.rand(8), "output_norm": torch.rand(6)}
    norms["regional_gradient"] = torch.rand(6, 8)
    there = {name: value.to(device) for name, value in norms.items()}
    for name, item in criteria.available().items():
        here = {**norms, "generator": torch.Generator().manual_seed(0)}
        elsewhere = {**there, "generator": torch.Generator().manual_seed(0)}
        score = item(weight.to(device), elsewhere)
        assert score.dtype == torch.float32, name
        torch.testing.assert_close(score.cpu(), item(weight, here))


def test_a_value_a_formula_does_not_know_is_named(weight: Tensor, norms: dict[str, Tensor]) -> None:
    with pytest.raises(SympruneError, match="p = 0, 1, 2"):
        criteria.get("lp")(weight, norms, {"p": 5})
    with pytest.raises(SympruneError, match="beta"):
        criteria.get("stochria")(weight, {**norms, "generator": torch.Generator()}, {"beta": 0})
