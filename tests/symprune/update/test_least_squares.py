"""Re-fitted weights against direct solutions."""

from __future__ import annotations

import itertools

import families
import pytest
import torch
from torch import Tensor

from symprune import Recipe, masks, prune
from symprune.errors import SympruneError
from symprune.masks import Pattern
from symprune.stats import GRAM, ChannelStats
from symprune.update import UPDATES
from symprune.update.least_squares import least_squares
from symprune.update.sparsegpt import sparsegpt


def problem(rows: int, columns: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator)
    x = x @ (torch.eye(columns) + 0.3 * torch.randn(columns, columns, generator=generator))
    weight = torch.randn(rows, columns, generator=generator)
    return weight, masks.keep_by_row(weight.abs(), 0.5), x


def half(values: Tensor, share: float) -> Tensor:
    """What a recipe's criterion keeps when `share` of a half has to go."""
    return masks.keep_by_row(values.abs(), round(0.5 * share, 6))


def error(x: Tensor, weight: Tensor, changed: Tensor) -> float:
    return float((x.double() @ (changed - weight).double().T).square().sum())


@pytest.mark.parametrize("shrink", [0, 0.3])
def test_conjugate_gradients_find_the_direct_solution(shrink: float) -> None:
    weight, keep, x = problem(10, 32, 200)
    gram = x.T @ x
    shift = 1e-4 * gram.diagonal().mean()
    damped = (gram + shift * torch.eye(32) + shrink * gram.diagonal().diag()).double()
    options = {"damping": 1e-4, "shrink": shrink}
    got = least_squares(weight, keep, gram, iters=200, tolerance=1e-7, **options)
    for row in range(10):
        kept = keep[row]
        lost = (weight[row] * ~kept).double()
        change = torch.linalg.solve(damped[kept][:, kept], (damped @ lost)[kept])
        expected = weight[row, kept].double() + change
        torch.testing.assert_close(got[row, kept].double(), expected, rtol=1e-3, atol=1e-4)
        assert (got[row, ~kept] == 0).all()


def test_more_iterations_never_hurt() -> None:
    weight, keep, x = problem(16, 48, 300)
    gram = x.T @ x
    errors = [error(x, weight, weight * keep)]
    for iters in (1, 2, 4, 8, 16, 32):
        got = least_squares(weight, keep, gram, iters=iters, damping=1e-6, tolerance=1e-9)
        errors.append(error(x, weight, got))
    assert all(b <= a * (1 + 1e-5) for a, b in itertools.pairwise(errors))
    assert errors[-1] < 0.7 * errors[0]


def test_shrinking_helps_on_other_tokens() -> None:
    weight, keep, x = problem(64, 48, 4096)
    few, others = x[:96], x[96:]
    plain, shrunk = (
        error(others, weight, least_squares(weight, keep, few.T @ few, shrink=shrink))
        for shrink in (0.0, 0.2)
    )
    assert shrunk < plain


@pytest.mark.parametrize("name", sorted(UPDATES))
def test_degenerate_inputs_stay_finite(name: str) -> None:
    """Fewer tokens than channels, dead channels, no signal at all."""
    weight, keep, x = problem(6, 40, 10)
    x[:, 5:9] = 0
    for inputs in (x, torch.zeros_like(x)):
        stats = ChannelStats(40, {GRAM})
        stats.add(inputs)
        update = UPDATES[name]()
        found = [(keep, update(weight, keep, stats))]
        if update.finds_mask:
            found.append(update.find(weight, stats, half, 0.5, None))
        for mask, got in found:
            assert torch.isfinite(got).all() and (got[~mask] == 0).all()
            assert mask.sum() == weight.numel() // 2


def test_nothing_pruned_changes_nothing() -> None:
    """Not a bit by least squares: with nothing lost, there is no step to take."""
    weight, _, x = problem(6, 16, 50)
    everything = torch.ones_like(weight, dtype=torch.bool)
    assert torch.equal(least_squares(weight, everything, x.T @ x), weight)
    got, mask = sparsegpt(weight, None, x.T @ x, sparsity=0.0)
    assert mask.all()
    torch.testing.assert_close(got, weight)


def test_sparsegpt_keeps_the_asked_share_and_beats_plain_masking() -> None:
    weight, keep, x = problem(32, 256, 1000)
    got, mask = sparsegpt(weight, None, x.T @ x, sparsity=0.5)
    assert int(mask.sum()) == weight.numel() // 2
    assert error(x, weight, got) < error(x, weight, weight * keep)
    with_mask, same = sparsegpt(weight, keep, x.T @ x)
    assert torch.equal(same, keep) and error(x, weight, with_mask) < error(x, weight, weight * keep)
    got, mask = sparsegpt(weight, None, x.T @ x, pattern=Pattern(2, 4))
    assert (mask.view(-1, 4).sum(1) == 2).all()


def plain_sparsegpt(weight: Tensor, gram: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """A column at a time, in double precision: what is left to the right is inverted anew."""
    weight, columns = weight.double().clone(), weight.shape[1]
    full = gram.double() + 0.01 * gram.double().diagonal().mean() * torch.eye(columns)
    inverses = [torch.linalg.inv(full[j:, j:]) for j in range(columns)]
    keep = torch.ones_like(weight, dtype=torch.bool)
    for j, inverse in enumerate(inverses):
        if j % pattern.m == 0:
            group = range(j, j + pattern.m)
            worth = torch.stack([weight[:, k] ** 2 / inverses[k][0, 0] for k in group], 1)
            lowest = worth.argsort(1)[:, : pattern.m - pattern.n]
            keep[:, j : j + pattern.m].scatter_(1, lowest, False)
        lost = weight[:, j] * ~keep[:, j]
        weight[:, j:] -= torch.outer(lost / inverse[0, 0], inverse[0])
    return weight * keep, keep


@pytest.mark.parametrize("pattern", ["1:3", "3:6", "2:4", "5:7", "1:42"])
@pytest.mark.parametrize("block", [4, 16, 128])
def test_sparsegpt_takes_patterns_that_do_not_divide_its_block(pattern: str, block: int) -> None:
    weight, _, x = problem(8, 84, 400)
    gram, chosen = x.T @ x, Pattern.parse(pattern)
    got, mask = sparsegpt(weight, None, gram, pattern=chosen, block=block)
    expected, keep = plain_sparsegpt(weight, gram, chosen)
    assert torch.equal(mask, keep)
    size = float(expected.abs().max())
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-4 * size)


@pytest.mark.parametrize("update_name", sorted(UPDATES))
@pytest.mark.parametrize("amount", [{"sparsity": 0.5}, {"group": "layer"}, {"pattern": "2:4"}])
def test_updates_lower_the_error_in_every_layer_of_a_model(
    update_name: str, amount: dict[str, object]
) -> None:
    recipe = Recipe(method="wanda", update=update_name, **amount)  # type: ignore[arg-type]
    report = prune(families.model(), families.tokens(8, 32), recipe, report_error=True)
    assert report.sparsity == 0.5
    if update_name == "lsq":
        for layer in report.layers:
            assert layer.figures["relative_error"] < layer.figures["relative_error_base"]


def test_swaps_then_update_is_better_than_either() -> None:
    tokens = families.tokens(8, 32)

    def total(**steps: object) -> float:
        recipe = Recipe(method="wanda", **steps)  # type: ignore[arg-type]
        report = prune(families.model(), tokens, recipe, report_error=True)
        return sum(layer.figures["relative_error"] for layer in report.layers[:7])

    both, swaps, lsq, plain = (
        total(refine="swap", update="lsq"), total(refine="swap"), total(update="lsq"), total(),
    )  # fmt: skip
    assert both < swaps < plain and both < lsq < plain


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("lsqr", "Unknown update 'lsqr'; choose lsq, sparsegpt, admm, alps"),
        ({"name": "lsq", "iters": 0}, "iters must be above 0"),
        ({"name": "sparsegpt", "iters": 3}, "no 'iters'"),
        ({"name": "admm", "iters": 10}, "finds its mask in 15 of 10 iterations"),
        ({"name": "admm", "rho": 0}, "rho must be above 0"),
        ({"name": "alps", "search_iters": 0}, "search_iters must be above 0"),
    ],
)
def test_bad_updates_say_what_is_wrong(options: object, said: str) -> None:
    with pytest.raises(SympruneError, match=said):
        Recipe(update=options)  # type: ignore[arg-type]


@pytest.mark.parametrize("select", [True, False])
def test_columns_no_token_ever_reached_are_zero_after_sparsegpt(select: bool) -> None:
    weight, keep, x = problem(8, 40, 300)
    x[:, [3, 17, 39]] = 0
    got, mask = sparsegpt(weight, None if select else keep, x.T @ x, block=16)
    assert torch.isfinite(got).all() and (got[:, [3, 17, 39]] == 0).all()
    assert (got[mask].view(-1) != 0).sum() == mask.sum() - mask[:, [3, 17, 39]].sum()
    assert error(x, weight, got) < error(x, weight, weight * (mask if select else keep))


def test_sparsegpt_selects_by_the_inverse_of_what_is_left() -> None:
    """In one block: the lowest w^2 / [H^-1]_jj, with H of the columns from j on, in double."""
    weight, _, x = problem(8, 24, 300)
    gram = x.T @ x
    damped = gram.double() + 0.01 * gram.double().diagonal().mean() * torch.eye(24)
    left = torch.stack([torch.linalg.inv(damped[j:, j:])[0, 0] for j in range(24)])
    _, mask = sparsegpt(weight, None, gram, sparsity=0.5)
    assert torch.equal(mask, masks.keep_by_layer(weight.double() ** 2 / left, 0.5))
