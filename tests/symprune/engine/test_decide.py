"""What becomes of one matrix: no more work than is used, and figures that mean what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from symprune import Recipe
from symprune.engine import decide
from symprune.stats import GRAM, MOMENTS, SQUARE, ChannelStats

ROWS, COLUMNS = 24, 32
ROUNDS = {"name": "lsq", "rounds": 3}


def measured(x: Tensor) -> ChannelStats:
    stats = ChannelStats(COLUMNS, (SQUARE, MOMENTS, GRAM))
    stats.add(x)
    return stats


@pytest.fixture
def matrix() -> tuple[Tensor, Tensor, Tensor]:
    """A weight, calibration tokens and others."""
    return torch.randn(ROWS, COLUMNS), torch.randn(4, 50, COLUMNS), torch.randn(4, 50, COLUMNS)


def decided(matrix: tuple[Tensor, Tensor, Tensor], held_out: bool = False, **options: Any) -> Any:
    weight, x, others = matrix
    report_error = options.pop("report_error", False)
    watched = measured(others) if held_out else None
    recipe = Recipe(method="wanda", **options)
    return decide.decide(
        "w", "mlp", weight, measured(x), None, recipe, report_error, held_out=watched
    )


@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ({}, 1),
        ({"refine": "swap", "update": "lsq"}, 1),
        ({"update": {"name": "sparsegpt", "select": False}}, 1),
        ({"update": "sparsegpt"}, 0),
        ({"update": {"name": "admm", "steps": 4}}, 4),
        ({"update": ROUNDS}, 3),
    ],
)
def test_a_base_mask_is_made_only_where_one_is_used_or_reported(
    options: dict[str, Any],
    scores: int,
    matrix: tuple[Tensor, Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, score = [], decide.score

    def counted(*arguments: Any) -> Tensor:
        made.append(arguments)
        return score(*arguments)

    monkeypatch.setattr(decide, "score", counted)
    plain = decided(matrix, **options)
    assert len(made) == scores and not plain.figures
    finds_mask = int("update" in options and scores != 1)
    for watched in ({"report_error": True}, {"held_out": True}):
        made.clear()
        reported = decided(matrix, **watched, **options)
        assert len(made) == scores + finds_mask and reported.figures
        assert torch.equal(reported.keep, plain.keep)


class Products(TorchDispatchMode):
    """Counts products of the matrix, or of one like it, with a Gram matrix."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
        shapes = [tuple(value.shape) for value in args if isinstance(value, Tensor)]
        self.count += function is torch.ops.aten.mm.default and shapes == [
            (ROWS, COLUMNS),
            (COLUMNS, COLUMNS),
        ]
        return function(*args, **(kw or {}))


@pytest.mark.parametrize(("options", "products"), [({}, 2), ({"update": "lsq"}, 3)])
def test_each_gram_is_multiplied_once_with_each_weight(
    options: dict[str, Any], products: int, matrix: tuple[Tensor, Tensor, Tensor]
) -> None:
    """With the dense weights, the masked ones and, if they are others, the final ones."""
    weight, x, others = matrix
    recipe = Recipe(method="wanda", **options)
    made = decide.decide("w", "mlp", weight, measured(x), None, recipe)
    base = decide.decide("w", "mlp", weight, measured(x), None, Recipe(method="wanda")).keep
    keep = base if made.weight is None else made.keep
    with Products() as counted:
        decide._figures(
            weight, base, decide.Decision(keep, made.weight), measured(x), measured(others)
        )
    assert counted.count == 2 * products


@pytest.mark.parametrize(
    "options",
    [{}, {"refine": "swap"}, {"update": ROUNDS}, {"update": "sparsegpt"}, {"update": "admm"}],
)
def test_figures_are_the_errors_of_the_base_mask_and_of_what_was_decided(
    options: dict[str, Any], matrix: tuple[Tensor, Tensor, Tensor]
) -> None:
    weight, x, others = matrix
    base = decided(matrix).keep
    found = decided(matrix, held_out=True, report_error=True, **options)
    final = weight * found.keep if found.weight is None else found.weight
    expected: dict[str, float] = {"exchanged": int((found.keep & ~base).sum())}
    for tokens, name in ((x, "relative_error"), (others, "held_out_error")):
        flat = tokens.reshape(-1, COLUMNS).double()
        whole = (flat @ weight.double().T).norm()
        for changed, suffix in ((weight * base, "_base"), (final, "")):
            lost = (flat @ (changed - weight).double().T).norm()
            expected[name + suffix] = float(lost / whole)
    mean = x.double().sum(1).mean(0)
    for changed, suffix in ((weight * base, "before"), (final, "after")):
        lost = (weight - changed).double() @ mean
        expected[f"expected_error_{suffix}"] = float(lost.abs().mean())
    assert found.figures == pytest.approx(expected, rel=1e-4)


def test_every_matrix_draws_numbers_of_its_own() -> None:
    def draws(seed: int, name: str) -> list[float]:
        return torch.rand(8, generator=decide.generator_for(seed, name)).tolist()

    assert draws(0, "a") == draws(0, "a")
    assert draws(0, "a") != draws(0, "b") and draws(0, "a") != draws(1, "a")
