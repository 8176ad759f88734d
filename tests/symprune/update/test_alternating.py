"""Mask and weights in turn: exact counts, lower errors, nothing to do when nothing goes."""

from __future__ import annotations

import families
import pytest
import torch
from torch import Tensor

from symprune import Recipe, masks, prune
from symprune.errors import SympruneError
from symprune.stats import GRAM, ChannelStats
from symprune.update.alternating import alternate
from symprune.update.least_squares import LeastSquares, least_squares


def problem(rows: int = 24, columns: int = 64, tokens: int = 400) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, columns, generator=generator)
    x = x @ (torch.eye(columns) + 0.3 * torch.randn(columns, columns, generator=generator))
    return torch.randn(rows, columns, generator=generator), x


def error(x: Tensor, weight: Tensor, changed: Tensor) -> float:
    return float((x.double() @ (changed - weight).double().T).square().sum())


def test_more_rounds_find_a_better_mask_than_one() -> None:
    weight, x = problem()
    gram, norm = x.T @ x, x.norm(dim=0)

    def mask_of(values: Tensor, share: float) -> Tensor:
        return masks.keep_by_row(values.abs() * norm, round(0.5 * share, 6))

    errors = []
    for rounds in (1, 4, 12):
        start, keep = alternate(weight, gram, mask_of, rounds=rounds)
        assert (keep.sum(1) == 32).all() and not start[~keep].any()
        fitted = least_squares(weight, keep, gram, iters=50, damping=1e-4)
        errors.append(error(x, weight, fitted))
    assert errors[2] < errors[1] < errors[0]
    assert errors[1] < 0.95 * errors[0]


def test_rounds_are_solved_to_the_end_and_scored_as_the_formula_says() -> None:
    """With enough steps a round's weights are a direct solution, whatever went before."""
    weight, x = problem()
    gram, share_of = x.T @ x, {1: 0.25, 2: 0.5}
    diagonal = gram.diagonal()
    added = 1e-3 * diagonal.mean() + 0.1 * diagonal
    full = (gram + added.diag()).double()
    scored: list[Tensor] = []

    def mask_of(values: Tensor, share: float) -> Tensor:
        scored.append(values)
        return masks.keep_by_row(values.abs(), share_of[len(scored)])

    def solved(keep: Tensor) -> Tensor:
        rows = torch.zeros_like(weight, dtype=torch.float64)
        for row, kept in enumerate(keep):
            lost = (weight[row] * ~kept).double()
            change = torch.linalg.solve(full[kept][:, kept], (full @ lost)[kept])
            rows[row, kept] = weight[row, kept].double() + change
        return rows

    steps = {"iters": 200, "last_iters": 200, "damping": 1e-3, "shrink": 0.1}
    fitted, keep = alternate(weight, gram, mask_of, rounds=2, **steps)  # type: ignore[arg-type]
    first = solved(masks.keep_by_row(weight.abs(), 0.25))
    values = first + (weight - first) @ full / full.diagonal()
    assert torch.equal(scored[0], weight)  # to the bit: nothing has been lost yet
    torch.testing.assert_close(scored[1].double(), values, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(fitted.double(), solved(keep), rtol=1e-3, atol=1e-4)


def test_one_round_is_the_criterions_mask() -> None:
    weight, x = problem()
    expected = masks.keep_by_row(weight.abs(), 0.5)
    _, keep = alternate(
        weight, x.T @ x, lambda values, _: masks.keep_by_row(values.abs(), 0.5), rounds=1
    )
    assert torch.equal(keep, expected)


def test_the_share_rises_and_ends_at_the_whole() -> None:
    weight, x = problem()
    shares: list[float] = []

    def mask_of(values: Tensor, share: float) -> Tensor:
        shares.append(share)
        return masks.keep_by_row(values.abs(), round(0.5 * share, 6))

    alternate(weight, x.T @ x, mask_of, rounds=5)
    # s (1 - (1 - t)^3) at t = 1/5 ... 5/5: 61/125 of all that goes is gone after the first round
    assert shares == pytest.approx([61 / 125, 98 / 125, 117 / 125, 124 / 125, 1])


@pytest.mark.parametrize("tokens", [0, 5])
def test_degenerate_inputs_stay_finite(tokens: int) -> None:
    weight, x = problem(tokens=tokens)
    fitted, keep = alternate(
        weight, x.T @ x, lambda v, s: masks.keep_by_row(v.abs(), round(0.5 * s, 6)), rounds=4
    )
    assert torch.isfinite(fitted).all() and (keep.sum(1) == 32).all()


@pytest.mark.parametrize(
    "amount",
    [{"sparsity": 0.5}, {"group": "layer"}, {"pattern": "2:4"}, {"pattern": "4:8"}],
)
@pytest.mark.parametrize("method", ["wanda", "ria", "symwanda", "magnitude", "stochria"])
def test_rounds_work_with_every_criterion_and_amount(
    method: str, amount: dict[str, object]
) -> None:
    tokens = families.tokens(8, 32)
    found = {}
    for rounds in (1, 6):
        step = {"name": "lsq", "rounds": rounds}
        recipe = Recipe(method=method, update=step, **amount)  # type: ignore[arg-type]
        model = families.model()
        report = prune(model, tokens, recipe, report_error=True)
        assert report.sparsity == 0.5
        found[rounds] = sum(layer.figures["relative_error"] for layer in report.layers)
        if recipe.n_of_m is not None:
            for keep in report.masks.values():
                assert (keep.view(-1, recipe.n_of_m.m).sum(1) == recipe.n_of_m.n).all()
    assert found[6] < found[1]


def test_rounds_leave_no_room_for_a_refinement() -> None:
    with pytest.raises(SympruneError, match="leave out the refinement"):
        Recipe(refine="swap", update={"name": "lsq", "rounds": 4})


def test_every_option_of_the_rounds_arrives() -> None:
    weight, x = problem()
    stats = ChannelStats(64, {GRAM})
    stats.add(x.unsqueeze(0))

    def mask_of(values: Tensor, share: float) -> Tensor:
        return masks.keep_by_row(values.abs(), round(0.5 * share, 6))

    chosen = LeastSquares(rounds=3, round_iters=1, iters=5, damping=0.1, shrink=1.5, tolerance=1e-9)
    keep, fitted = chosen.find(weight, stats, mask_of, 0.5, None)
    expected, mask = alternate(
        weight, stats.gram, mask_of, rounds=3, iters=1, last_iters=5, damping=0.1,
        shrink=1.5 * 64 / len(x), tolerance=1e-9,
    )  # fmt: skip
    assert torch.equal(keep, mask) and torch.equal(fitted, expected)
