"""Layers to put on a grid: weights, masks, and Gram matrices of every kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from symprune import masks
from symprune.update.damped_gram import DampedGram

COLUMNS = 100


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gram_of(x: Tensor) -> Tensor:
    return x.T @ x


def mixed(tokens: int, columns: int, seed: int) -> Tensor:
    """Inputs whose channels are correlated."""
    turn = torch.eye(columns) + 0.5 * normal(columns, columns, seed=seed + 1)
    return normal(tokens, columns, seed=seed) @ turn


GRAMS: dict[str, Any] = {
    "correlated": lambda n, seed: gram_of(mixed(4 * n, n, seed)),
    "fewer tokens than channels": lambda n, seed: gram_of(mixed(n // 4 + 1, n, seed)),
    "one direction above all": lambda n, seed: gram_of(normal(4 * n, n, seed=seed) + 30),
    "badly scaled": lambda n, seed: gram_of(mixed(4 * n, n, seed) * torch.logspace(3, -3, n)),
    "dead channels": lambda n, seed: gram_of(mixed(4 * n, n, seed) * (torch.arange(n) % 3 > 0)),
    "diagonal": lambda n, seed: torch.logspace(2, -2, n).diag(),
    "rank one": lambda n, seed: gram_of(normal(1, n, seed=seed)),
    "zero": lambda n, seed: torch.zeros(n, n),
    "huge": lambda n, seed: gram_of(normal(4 * n, n, seed=seed) * 1e15),
    "beyond all numbers": lambda n, seed: torch.full((n, n), 1e38),
}


def damped(kind: str, columns: int = COLUMNS, seed: int = 1) -> DampedGram:
    return DampedGram.from_gram(GRAMS[kind](columns, seed), 0.01, 0.1)


def errors(gram: DampedGram, weight: Tensor, fitted: Tensor) -> Tensor:
    """Row by row, in double precision."""
    lost = weight.double() - fitted.double()
    whole = gram.gram.double() + gram.added.double().diag()
    return ((lost @ whole) * lost).sum(1)


def slack(gram: DampedGram, weight: Tensor) -> Tensor:
    """A rounding, in single precision, of what the rows would lose as a whole."""
    return torch.finfo(torch.float32).eps * weight.shape[1] * errors(gram, weight, 0 * weight)


def problem(rows: int, columns: int, share: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    weight = normal(rows, columns, seed=seed)
    return weight, masks.keep_by_row(weight.abs(), share)
