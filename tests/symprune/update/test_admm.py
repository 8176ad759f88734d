"""ADMM pruning and ALPS against slow transcriptions and direct solutions, in double precision."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
from torch import Tensor

from symprune import Recipe, masks, prune
from symprune.masks import Pattern
from symprune.stats import GRAM, SQUARE, ChannelStats
from symprune.update import UPDATES
from symprune.update.admm import ADMM, admm
from symprune.update.alps import ALPS, search
from symprune.update.alternating import MaskOf
from symprune.update.damped_gram import DampedGram
from symprune.update.least_squares import least_squares

ROWS, COLUMNS = 8, 40


def problem(tokens: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, COLUMNS, generator=generator)
    x = x @ (torch.eye(COLUMNS) + 0.3 * torch.randn(COLUMNS, COLUMNS, generator=generator))
    return torch.randn(ROWS, COLUMNS, generator=generator), x * torch.logspace(1, -1, COLUMNS)


def stats_of(x: Tensor) -> ChannelStats:
    stats = ChannelStats(x.shape[1], {SQUARE, GRAM})
    stats.add(x.unsqueeze(0))
    return stats


def by_wanda(x: Tensor, sparsity: float = 0.5) -> MaskOf:
    norm = x.norm(dim=0)
    return lambda values, share: masks.keep_by_row(values.abs() * norm, round(sparsity * share, 6))


def error(x: Tensor, weight: Tensor, changed: Tensor) -> float:
    return float((x.double() @ (changed.double() - weight.double()).T).square().sum())


def plain_admm(
    weight: Tensor, x: Tensor, removed: list[int], iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As the paper writes it, transposed, with weights, auxiliary variable and multiplier apart: in
    double precision, a row at a time. removed: how many each of the first iterations removes.
    Also the smallest gap between what stays and what goes, in units of what goes."""
    x, gap = x.double(), torch.tensor(torch.inf, dtype=torch.float64)
    norm = x.square().sum(0).sqrt()
    gram = (x / norm).T @ (x / norm) + 0.1 * torch.eye(COLUMNS, dtype=torch.float64)
    inverse = torch.linalg.inv(gram + torch.eye(COLUMNS, dtype=torch.float64))
    rows, kept = [], []
    for dense in weight.double():
        hat, multiplier = dense * norm, torch.zeros(COLUMNS, dtype=torch.float64)
        target = gram @ hat
        for number in range(iters):
            together = hat + multiplier
            if number < len(removed):
                order = together.abs().argsort()
                keep = torch.ones(COLUMNS, dtype=torch.bool)
                keep[order[: removed[number]]] = False
                low, high = together.abs()[order[removed[number] - 1 : removed[number] + 1]]
                gap = torch.minimum(gap, (high - low) / low)
            sparse = torch.where(keep, together, 0.0)
            multiplier = multiplier + (hat - sparse)
            hat = inverse @ (target + (sparse - multiplier))
        rows.append(torch.where(keep, hat + multiplier, 0.0) / norm)
        kept.append(keep)
    return torch.stack(rows), torch.stack(kept), gap


@pytest.mark.parametrize(("steps", "iters"), [(1, 1), (4, 7), (15, 20), (6, 6)])
def test_it_is_the_papers_iteration(steps: int, iters: int) -> None:
    weight, x = problem()
    shares = [0.5 * (1 - (1 - number / steps) ** 3) for number in range(1, steps + 1)]
    removed = [masks.count_removed(COLUMNS, round(share, 6)) for share in shares]
    assert removed[-1] == COLUMNS // 2
    expected, kept, gap = plain_admm(weight, x, removed, iters)
    assert gap > 1e-5  # no weight is so close to going that rounding decides
    fitted, keep = admm(weight, stats_of(x).gram, by_wanda(x), steps=steps, iters=iters)
    assert torch.equal(keep, kept)
    torch.testing.assert_close(
        fitted.double() * x.norm(dim=0), expected * x.norm(dim=0), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("damping", [0.02, 0.1])
@pytest.mark.parametrize("rho", [0.3, 1.0])
def test_under_a_mask_it_converges_to_least_squares(rho: float, damping: float) -> None:
    weight, x = problem()
    keep, gram = masks.keep_by_row(weight.abs(), 0.5), stats_of(x).gram
    full = (gram + damping * gram.diagonal().diag()).double()
    expected = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for row, kept in enumerate(keep):
        there = torch.linalg.solve(full[kept][:, kept], (full @ weight[row].double())[kept])
        expected[row, kept] = there
    errors = []
    for iters in (20, 2000):
        update = ADMM(select=False, iters=iters, damping=damping, rho=rho)
        got = update(weight, keep, stats_of(x))
        assert not got[~keep].any()
        errors.append(float(((got - expected) * x.norm(dim=0)).norm()))
    size = float((expected * x.norm(dim=0)).norm())
    assert errors[1] < 1e-4 * size and errors[1] < errors[0] < 0.5 * size


def test_it_ends_where_conjugate_gradients_do() -> None:
    """The damping is this project's `shrink`: a part of every channel's own energy."""
    weight, x = problem()
    keep, gram = masks.keep_by_row(weight.abs(), 0.5), stats_of(x).gram
    fitted = ADMM(select=False, iters=3000)(weight, keep, stats_of(x))
    other = least_squares(weight, keep, gram, damping=0, shrink=0.1, iters=300, tolerance=0)
    norm = x.norm(dim=0)
    torch.testing.assert_close(fitted * norm, other * norm, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["admm", "alps"])
def test_the_mask_it_finds_is_better_than_the_one_it_began_with(name: str) -> None:
    weight, x = problem()
    stats, mask_of = stats_of(x), by_wanda(x)
    given = UPDATES[name](select=False)(weight, mask_of(weight, 1.0), stats)
    keep, found = UPDATES[name]().find(weight, stats, mask_of, 0.5, None)
    assert (keep.sum(1) == COLUMNS // 2).all() and not found[~keep].any()
    assert error(x, weight, found) < 0.97 * error(x, weight, given)


@pytest.mark.parametrize("name", ["admm", "alps"])
@pytest.mark.parametrize(
    "amount",
    [{"sparsity": 0.5}, {"sparsity": 0.37}, {"group": "layer"}, {"pattern": "2:4"},
     {"pattern": "3:8"}, {"allocate": "owl"}],
)  # fmt: skip
@pytest.mark.parametrize("method", ["wanda", "ria", "magnitude"])
def test_the_right_number_is_kept_whatever_the_amount(
    method: str, amount: dict[str, Any], name: str
) -> None:
    recipe = Recipe(method=method, update={"name": name}, **amount)
    plain = recipe.with_changes(update=None)
    tokens = families.tokens(8, 32)
    model, other = families.model(), families.model()
    report, expected = prune(model, tokens, recipe), prune(other, tokens, plain)
    for layer, same in zip(report.layers, expected.layers, strict=True):
        assert layer.removed == same.removed
    for key, keep in report.masks.items():
        weight = model.get_parameter(key)
        assert not weight[~keep].any() and (weight[keep] != 0).all()
        if recipe.n_of_m is not None:
            assert (keep.view(-1, recipe.n_of_m.m).sum(1) == recipe.n_of_m.n).all()
        elif recipe.group == "row" and recipe.allocate is None:
            assert (keep.sum(1) == expected.masks[key].sum(1)).all()


@pytest.mark.parametrize("name", ["admm", "alps"])
def test_nothing_to_remove_changes_nothing_but_rounding(name: str) -> None:
    weight, x = problem()
    for update in (UPDATES[name](), UPDATES[name](select=False)):
        everything = torch.ones_like(weight, dtype=torch.bool)
        keep, found = everything, update(weight, everything, stats_of(x))
        if update.finds_mask:
            keep, found = update.find(weight, stats_of(x), lambda v, _: v.isfinite(), 0.0, None)
        assert keep.all()
        torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-5)


def test_channels_no_token_reaches_keep_their_weights() -> None:
    weight, x = problem()
    x[:, [2, 30]] = 0
    keep = masks.keep_by_row(weight.abs(), 0.5)
    fitted = ADMM(select=False)(weight, keep, stats_of(x))
    torch.testing.assert_close(fitted[:, [2, 30]], (weight * keep)[:, [2, 30]])


def plain_search(weight: Tensor, x: Tensor, iters: int) -> tuple[Tensor, Tensor, Tensor]:
    """ALPS's support search, with weights B, sparse weights D and dual variable V apart."""
    x = x.double()
    gram = x.T @ x
    gram = gram + 0.01 * gram.diagonal().mean() * torch.eye(COLUMNS, dtype=torch.float64)
    norm = gram.diagonal().sqrt()
    gram, dense = gram / norm / norm.unsqueeze(1), weight.double() * norm
    rho, dual, gap = 0.1, torch.zeros_like(dense), torch.tensor(torch.inf, dtype=torch.float64)
    mask = masks.keep_by_row(dense.abs(), 0.5)
    sparse = last = dense * mask
    for number in range(1, iters + 1):
        shifted = gram + rho * torch.eye(COLUMNS, dtype=torch.float64)
        free = torch.linalg.solve(shifted, (dense @ gram - dual + rho * sparse).T).T
        together = free + dual / rho
        ordered = together.abs().sort(1).values
        low, high = ordered[:, COLUMNS // 2 - 1], ordered[:, COLUMNS // 2]
        gap = torch.minimum(gap, ((high - low) / low).min())
        mask = masks.keep_by_row(together.abs(), 0.5)
        sparse = together * mask
        dual = dual + rho * (free - sparse)
        if number % 3 == 0:
            share = float(((sparse != 0) ^ (last != 0)).sum() / mask.sum())
            last = sparse
            if share == 0 or (number > 30 and share < 3e-4):
                break
            rho *= 1.3 if share >= 0.1 else 1.2 if share >= 0.005 else 1.1
    return sparse / norm, mask, gap


@pytest.mark.parametrize("iters", [1, 3, 7, 300])
def test_the_search_is_that_of_the_paper(iters: int) -> None:
    weight, x = problem()
    expected, mask, gap = plain_search(weight, x, iters)
    assert gap > 1e-5
    damped_gram = DampedGram.from_gram(stats_of(x).gram, 0.01, 0.0)
    norm = damped_gram.diagonal.sqrt()

    def mask_of(values: Tensor, share: float) -> Tensor:
        assert share == 1
        return masks.keep_by_row(values.abs() * norm, 0.5)

    fitted, keep = search(weight, damped_gram, mask_of, iters=iters)
    assert torch.equal(keep, mask)
    torch.testing.assert_close(fitted.double() * norm, expected * norm, rtol=1e-3, atol=1e-3)


def test_what_was_found_is_fitted_to_the_end() -> None:
    weight, x = problem()
    keep, found = ALPS(iters=200).find(weight, stats_of(x), by_wanda(x), 0.5, None)
    best = least_squares(weight, keep, stats_of(x).gram, damping=0.01, iters=200, tolerance=0)
    norm = x.norm(dim=0)
    torch.testing.assert_close(found * norm, best * norm, rtol=1e-3, atol=1e-3)


def test_a_pattern_holds_on_the_way() -> None:
    """Of what 2:4 removes, never more than two of four are gone before the end."""
    weight, x = problem()
    seen: list[Tensor] = []

    def mask_of(values: Tensor, share: float) -> Tensor:
        seen.append(masks.keep_nested(values.abs() * x.norm(dim=0), Pattern(2, 4), share))
        return seen[-1]

    _, keep = admm(weight, stats_of(x).gram, mask_of)
    assert len(seen) == 15 and all((each.view(-1, 4).sum(1) >= 2).all() for each in seen)
    assert (keep.view(-1, 4).sum(1) == 2).all()
