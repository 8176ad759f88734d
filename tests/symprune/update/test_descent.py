"""Conjugate gradients over the kept weights: whatever the Gram matrix is like and however many
steps are allowed, no row's error rises and nothing stops being a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from symprune import masks
from symprune.update import damped_gram as damped_gram_module
from symprune.update.alternating import alternate
from symprune.update.damped_gram import STEPS_UNSEEN, DampedGram
from symprune.update.least_squares import least_squares

ITERS = (1, 2, 3, 5, 10, 50, 1000)
CHANNELS = 48


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gram_of(x: Tensor) -> Tensor:
    return x.T @ x


def badly_conditioned(channels: int, seed: int) -> Tensor:
    turned, _ = torch.linalg.qr(normal(channels, channels, seed=seed))
    x = normal(4 * channels, channels, seed=seed + 1)
    return gram_of((x @ turned * torch.logspace(0, -6, channels)) @ turned.T)


def rank_one(channels: int, seed: int) -> Tensor:
    direction = normal(channels, seed=seed)
    return torch.outer(direction, direction)


GRAMS: dict[str, Callable[[int, int], Tensor]] = {
    "well conditioned": lambda n, seed: gram_of(normal(4 * n, n, seed=seed)),
    "badly conditioned": badly_conditioned,
    "badly scaled": lambda n, seed: gram_of(normal(4 * n, n, seed=seed) * torch.logspace(3, -3, n)),
    "fewer tokens than channels": lambda n, seed: gram_of(normal(n // 4 + 1, n, seed=seed)),
    "one direction above all": lambda n, seed: gram_of(normal(4 * n, n, seed=seed) + 30),
    "diagonal": lambda n, seed: torch.logspace(4, -4, n).diag(),
    "rank one": rank_one,
    "zero": lambda n, seed: torch.zeros(n, n),
    "dead channels": lambda n, seed: gram_of(
        normal(4 * n, n, seed=seed) * (torch.arange(n) % 3 > 0)
    ),
    "tiny": lambda n, seed: gram_of(normal(4 * n, n, seed=seed) * 1e-18),
    "huge": lambda n, seed: gram_of(normal(4 * n, n, seed=seed) * 1e17),
}


def errors(damped_gram: DampedGram, weight: Tensor, fitted: Tensor) -> Tensor:
    """Row by row, in double precision."""
    lost = weight.double() - fitted.double()
    whole = damped_gram.gram.double() + damped_gram.added.double().diag()
    return ((lost @ whole) * lost).sum(1)


def assert_no_row_is_worse(after: Tensor, before: Tensor, began: Tensor) -> None:
    """To a rounding, in single precision, of what the rows began with."""
    assert (after <= before + torch.finfo(torch.float32).eps * began).all()


@pytest.mark.parametrize("damping", [1e-1, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("kind", sorted(GRAMS))
def test_no_number_of_steps_makes_a_row_worse(kind: str, damping: float) -> None:
    weight = normal(24, CHANNELS, seed=0)
    keep = masks.keep_by_row(weight.abs(), 0.5)
    damped_gram = DampedGram.from_gram(GRAMS[kind](CHANNELS, 1), damping, 0.0)
    began = before = errors(damped_gram, weight, weight * keep)
    for iters in ITERS:
        fitted = weight * keep
        pull = damped_gram.descend(weight, fitted, keep, iters)
        assert torch.isfinite(fitted).all() and torch.isfinite(pull).all()
        assert (fitted[~keep] == 0).all()
        after = errors(damped_gram, weight, fitted)
        assert_no_row_is_worse(after, before, began)
        before = after
    # From where it ended, as rounds begin.
    damped_gram.descend(weight, fitted, keep, 1000)
    assert_no_row_is_worse(errors(damped_gram, weight, fitted), before, began)


@given(
    st.integers(1, 20),
    st.sampled_from(sorted(GRAMS)),
    st.floats(-6, 0),
    st.floats(0.05, 0.95),
    st.sampled_from(ITERS),
    st.integers(0, 1000),
)
def test_no_mask_and_no_gram_makes_a_row_worse(
    channels: int, kind: str, exponent: float, share: float, iters: int, seed: int
) -> None:
    weight = normal(6, channels, seed=seed)
    keep = torch.rand(6, channels, generator=torch.Generator().manual_seed(seed)) < share
    damped_gram = DampedGram.from_gram(GRAMS[kind](channels, seed), 10**exponent, 0.0)
    fitted = weight * keep
    began = errors(damped_gram, weight, fitted)
    damped_gram.descend(weight, fitted, keep, iters)
    assert torch.isfinite(fitted).all()
    assert_no_row_is_worse(errors(damped_gram, weight, fitted), began, began)


@pytest.mark.parametrize("iters", [1, 4, 1000])
@pytest.mark.parametrize("kind", sorted(GRAMS))
def test_no_round_makes_a_row_worse(kind: str, iters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    descend, calls = DampedGram.descend, []

    def watched(
        self: DampedGram, weight: Tensor, fitted: Tensor, keep: Tensor, *rest: Any
    ) -> Tensor:
        before = errors(self, weight, fitted * keep)  # what went is taken from them, too
        pull = descend(self, weight, fitted, keep, *rest)
        assert_no_row_is_worse(errors(self, weight, fitted), before, before)
        calls.append(rest)
        return pull

    monkeypatch.setattr(DampedGram, "descend", watched)
    weight = normal(24, CHANNELS, seed=0)
    fitted, keep = alternate(
        weight,
        GRAMS[kind](CHANNELS, 1),
        lambda values, share: masks.keep_by_row(values.abs(), round(0.5 * share, 6)),
        rounds=6,
        iters=iters,
        last_iters=iters,
    )
    assert len(calls) == 6 and (keep.sum(1) == CHANNELS // 2).all()
    assert torch.isfinite(fitted).all() and (fitted[~keep] == 0).all()


def test_a_gram_that_overflows_leaves_the_weights_as_they_were() -> None:
    weight = normal(8, CHANNELS, seed=0)
    keep = masks.keep_by_row(weight.abs(), 0.5)
    gram = torch.full((CHANNELS, CHANNELS), 1e38)
    assert torch.equal(least_squares(weight, keep, gram, iters=50), weight * keep)


@pytest.mark.parametrize("narrow", [0, CHANNELS])
def test_the_pull_is_the_same_whether_the_damped_gram_is_a_matrix_of_its_own(
    narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damped_gram_module, "NARROW", narrow)
    damped_gram = DampedGram.from_gram(GRAMS["well conditioned"](CHANNELS, 1), 0.01, 0.1)
    weight = normal(24, CHANNELS, seed=0)
    whole = damped_gram.gram.double() + damped_gram.added.double().diag()
    keep = masks.keep_by_row(weight.abs(), 0.5)
    fitted = weight * keep
    for lost, pull in (
        (weight, damped_gram.pull(weight)),
        (weight, damped_gram.pull(weight, out=torch.empty_like(weight))),
        (weight - fitted, damped_gram.descend(weight, fitted, keep, 0)),
    ):
        expected = lost.double() @ whole
        # Each number is a sum of as many products as there are channels.
        room = (
            CHANNELS
            * torch.finfo(torch.float32).eps
            * float((lost.double().abs() @ whole.abs()).max())
        )
        torch.testing.assert_close(pull.double(), expected, rtol=0, atol=room)


class Looks(TorchDispatchMode):
    """Counts how often a value is fetched: what an accelerator has to be waited for."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kw or {}))


def test_rows_are_looked_at_once_in_several_steps() -> None:
    weight = normal(8, CHANNELS, seed=0)
    keep, gram = masks.keep_by_row(weight.abs(), 0.5), gram_of(normal(400, CHANNELS, seed=1))
    for iters, tolerance in ((STEPS_UNSEEN, 0.0), (5 * STEPS_UNSEEN, 0.0), (1000, 0.1)):
        with Looks() as looks:
            least_squares(weight, keep, gram, iters=iters, tolerance=tolerance)
        # One more at the end, on a CPU, which has not to wait for it.
        assert looks.count <= (iters - 1) // STEPS_UNSEEN + 1
    assert looks.count == 2  # all were done when first looked at
