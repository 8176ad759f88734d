"""Linear regression by its normal equations: `f_i(w) = 1/2 w^T Q_i w - b_i^T w + c_i`.

Clients of very different sizes share one shape `[d, d]`, so hundreds of them are one product, and
the minimiser, L_i and mu_i are exact. Full gradients only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.problems.losses import Linear, along
from symprune.fed.problems.problem import Constants, Problem, Rows


@dataclass(frozen=True)
class Quadratic(Problem):
    """A `Problem` whose rows are the rows of `Q_i`; `y` holds `b_i`, and `offset` is `c_i`."""

    offset: Tensor | None = None
    sizes: tuple[int, ...] = ()

    def select(self, rows: Tensor | slice) -> Problem:
        chosen = super().select(rows)
        assert isinstance(chosen, Quadratic) and self.offset is not None
        sizes = torch.tensor(self.sizes)[rows].tolist()
        return replace(chosen, offset=self.offset[rows], sizes=tuple(sizes))

    def to(self, device: str | torch.device) -> Problem:
        moved = super().to(device)
        assert isinstance(moved, Quadratic) and self.offset is not None
        return replace(moved, offset=self.offset.to(device))

    def masked(self, masks: Mapping[str, Tensor]) -> Problem:
        """With the kept rows and columns of `Q_i`, the kept entries of `b_i`."""
        chosen, kept = super().masked(masks), self.rows
        at = chosen.layout.gather(torch.arange(self.dimension))
        return replace(
            chosen, rows=Rows(kept.x[:, at][:, :, at], kept.y[:, at], kept.weights[:, at])
        )

    def unmasked(self) -> Problem:
        if self.layout.digest:
            raise SympruneError(f"{self.name} has lost what its masks prune.")
        return self

    def value(self, w: Tensor, batch: Rows | None = None) -> Tensor:
        _full_only(batch is None)
        w = self._spread(w)
        assert self.offset is not None
        return (w * (along(self.rows.x, w) / 2 - self.rows.y)).sum(1) + self.offset

    def gradient(self, w: Tensor, batch: Rows | None = None) -> Tensor:
        _full_only(batch is None)
        return along(self.rows.x, self._spread(w)) - self.rows.y

    @cached_property
    def _constants(self) -> Constants:
        eigenvalues = torch.linalg.eigvalsh(self.rows.x.double())
        together = torch.linalg.eigvalsh(self.rows.x.double().mean(0))
        return Constants(
            tuple(eigenvalues[:, -1].tolist()),
            tuple(eigenvalues[:, 0].clamp_min(0).tolist()),
            self.sizes,
            self.layout,
            float(together[-1]),
        )

    def _take(self, index: Tensor, weights: Tensor, seeds: Tensor | None) -> Rows:
        _full_only(False)
        return self.rows


def _full_only(full: bool) -> None:
    if not full:
        raise SympruneError("Normal equations give full gradients only; drop the batch size.")


def quadratic(Q: Tensor, b: Tensor, c: Tensor | None = None, name: str = "quadratic") -> Quadratic:
    """`f_i(w) = 1/2 w^T Q_i w - b_i^T w + c_i` from `Q [n, d, d]`, `b [n, d]`."""
    n, d = b.shape
    rows = Rows(Q, b, torch.ones_like(b))
    offset = torch.zeros(n, dtype=b.dtype) if c is None else c
    return Quadratic(Linear(d), rows, offset=offset, sizes=(1,) * n, name=name)


def normal_equations(
    parts: list[tuple[Tensor, Tensor]], l2: float, test: Rows | None = None, name: str = "linear"
) -> Quadratic:
    """`f_i(w) = 1/2 ||A_i w - b_i||^2 + l2/2 ||w||^2` from clients' rows (sums, not means)."""
    d, dtype = parts[0][0].shape[1], parts[0][0].dtype
    ridge = l2 * torch.eye(d, dtype=torch.float64)
    Q = torch.stack([(a.double().T @ a.double() + ridge).to(dtype) for a, _ in parts])
    b = torch.stack([(a.double().T @ y.double()).to(dtype) for a, y in parts])
    c = torch.stack([(y.double().square().sum() / 2).to(dtype) for _, y in parts])
    problem = quadratic(Q, b, c, name)
    return replace(problem, sizes=tuple(len(y) for _, y in parts), test=test)
