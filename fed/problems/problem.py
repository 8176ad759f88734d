"""The problem all algorithms solve: `min_w (1/n) sum_i f_i(w)`, client i holding f_i.

A `Problem` is a stack of clients: data padded to one shape with row weights, a loss, a regulariser.
`problem.select(rows)` is the same problem seen by some of the clients, so a client function written
for the stack runs alone on one machine. Constants L_i and mu_i feed the theorems' step sizes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.problems.layout import FlatLayout, keep_layout
from symprune.fed.problems.losses import Loss
from symprune.fed.problems.masked import KeptWeights, restrict
from symprune.fed.randomness import Stream

WEIGHTINGS = ("mean", "size", "sum")


@dataclass(frozen=True)
class Rows:
    """Rows of C clients, padded: `x [C, m, ...]`, `y [C, m]`, `weights [C, m]` (0 on padding)."""

    x: Tensor
    y: Tensor
    weights: Tensor

    def __getitem__(self, index: Any) -> Rows:
        return Rows(self.x[index], self.y[index], self.weights[index])

    def to(self, dtype: torch.dtype) -> Rows:
        return Rows(self.x.to(dtype), self.y.to(dtype), self.weights.to(dtype))


def stack_rows(parts: Sequence[tuple[Tensor, Tensor]], weighting: str = "mean") -> Rows:
    """Clients' (x, y) stacked and padded. Row weights: `mean` 1/m_i; `size` n/N, so that
    `(1/n) sum f_i` is the mean over all N rows; `sum` 1."""
    if weighting not in WEIGHTINGS:
        raise SympruneError(
            f"Unknown weighting {weighting!r}; choose from {', '.join(WEIGHTINGS)}."
        )
    counts = [len(y) for _, y in parts]
    if min(counts) == 0:
        raise SympruneError(f"Client {counts.index(0)} has no rows.")
    most, total = max(counts), sum(counts)
    x = parts[0][0].new_zeros(len(parts), most, *parts[0][0].shape[1:])
    y = x.new_zeros(len(parts), most)
    weights = torch.zeros_like(y)
    for i, (rows, targets) in enumerate(parts):
        m = counts[i]
        x[i, :m], y[i, :m] = rows, targets
        weights[i, :m] = {"mean": 1 / m, "size": len(parts) / total, "sum": 1.0}[weighting]
    return Rows(x, y, weights)


@dataclass(frozen=True)
class Constants:
    """What step sizes are computed from; one entry per client, in order of client numbers."""

    L: tuple[float, ...]
    mu: tuple[float, ...]
    sizes: tuple[int, ...]
    layout: FlatLayout
    L_mean: float | None = None  # smoothness of f itself, when known

    @property
    def dimension(self) -> int:
        return self.layout.dimension

    @property
    def clients(self) -> int:
        return len(self.sizes)

    @property
    def L_max(self) -> float:
        return max(self.L)

    @property
    def L_tilde(self) -> float:
        """`sqrt((1/n) sum L_i^2)`."""
        return (sum(v * v for v in self.L) / len(self.L)) ** 0.5

    @property
    def L_f(self) -> float:
        """Smoothness of f: exact when known, else its bound L_tilde."""
        return self.L_tilde if self.L_mean is None else self.L_mean

    @property
    def mu_min(self) -> float:
        return min(self.mu)

    @property
    def known(self) -> bool:
        """Whether L_i and mu_i are known; they are not for networks."""
        return all(math.isfinite(v) for v in (*self.L, *self.mu))

    @property
    def kappa_max(self) -> float:
        return max(a / b for a, b in zip(self.L, self.mu, strict=True))


@dataclass(frozen=True)
class Problem:
    """`f_i(w) = loss on client i's rows + l2/2 ||w||^2 + nonconvex * sum_j w_j^2/(1+w_j^2)`."""

    loss: Loss
    rows: Rows
    l2: float = 0.0
    nonconvex: float = 0.0
    test: Rows | None = None  # one common test set [1, m, ...]
    client_test: Rows | None = None  # each client's own [C, m, ...]
    ids: Tensor | None = None  # the clients' numbers; None: all, in order
    name: str = "problem"

    @property
    def clients(self) -> int:
        return len(self.rows.y)

    @property
    def numbers(self) -> Tensor:
        return torch.arange(self.clients) if self.ids is None else self.ids

    @property
    def layout(self) -> FlatLayout:
        return self.loss.layout

    @cached_property
    def dimension(self) -> int:
        return self.layout.dimension

    @cached_property
    def counts(self) -> Tensor:
        """Rows of each client."""
        return (self.rows.weights != 0).sum(1)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.x.dtype

    def initial(self, seed: int = 0) -> Tensor:
        """The usual start: zero for the linear models, the module's own initialisation else."""
        return self.loss.initial(seed).to(self.dtype)

    def select(self, rows: Tensor | slice) -> Problem:
        """The same problem for the clients at these places of the stack."""
        own = None if self.client_test is None else self.client_test[rows]
        return replace(self, rows=self.rows[rows], client_test=own, ids=self.numbers[rows])

    def masked(self, masks: Mapping[str, Tensor]) -> Problem:
        """The same problem in the weights that the masks keep, such as a `MaskSet`'s: the others
        are zero and nobody's concern. Vectors of the whole model are cut to the kept weights."""
        if self.layout.digest:
            raise SympruneError(f"{self.name} has masks already.")
        layout = keep_layout(self.layout, masks)
        return replace(self, loss=restrict(self.loss, layout))

    def unmasked(self) -> Problem:
        """The problem in all weights, whatever is kept."""
        loss = self.loss.loss if isinstance(self.loss, KeptWeights) else self.loss
        return replace(self, loss=loss)

    def value(self, w: Tensor, batch: Rows | None = None) -> Tensor:
        """`f_i(w_i)` for every client, `[C]`; `w` is `[C, d]` or one `[d]` for all."""
        w, rows = self._spread(w), batch or self.rows
        return self.loss.value(w, rows.x, rows.y, rows.weights) + self._penalty(w)

    def gradient(self, w: Tensor, batch: Rows | None = None) -> Tensor:
        """`grad f_i(w_i)` for every client, `[C, d]`, on all rows or on a batch of each."""
        w, rows = self._spread(w), batch or self.rows
        gradient = self.loss.gradient(w, rows.x, rows.y, rows.weights)
        if self.l2:
            gradient = gradient + self.l2 * w
        if self.nonconvex:
            gradient = gradient + self.nonconvex * 2 * w / (1 + w.square()).square()
        return gradient

    def batch(self, stream: Stream, size: int) -> Rows:
        """`size` rows of each client drawn uniformly with replacement: an unbiased gradient."""
        index = stream.integers(self.counts.unsqueeze(1), size)
        share = self.rows.weights.sum(1, keepdim=True) / size
        return self._take(index, share.expand(-1, size))

    def epoch(self, stream: Stream, size: int) -> Iterator[tuple[Rows, Tensor]]:
        """One pass over every client's rows in random order, `size` at a time: batches weighted to
        a mean times the client's total weight, and which clients still had rows (`[C]` bool)."""
        most = self.rows.y.shape[1]
        padding = (self.rows.weights == 0) * 2.0
        order = (stream.uniform(most) + padding).argsort(dim=1, stable=True)
        total = self.rows.weights.sum(1, keepdim=True)
        for start in range(0, int(self.counts.max()), size):
            index = order[:, start : start + size]
            valid = torch.arange(start, start + index.shape[1]) < self.counts.unsqueeze(1)
            held = valid.sum(1, keepdim=True).clamp_min(1)
            yield self._take(index, valid * (total / held)), valid.any(1)

    def constants(self) -> Constants:
        """L_i (spectral bound), mu_i = l2, sizes; L of the mean from all rows together."""
        return self._constants

    @cached_property
    def _constants(self) -> Constants:
        if not hasattr(self.loss, "smoothness"):
            unknown = (float("nan"),) * self.clients
            return Constants(unknown, unknown, tuple(self.counts.tolist()), self.layout)
        extra = self.l2 + 2 * self.nonconvex
        local = self.loss.smoothness(self.rows.x, self.rows.weights) + extra
        flat = self.rows.x.reshape(1, -1, self.rows.x.shape[-1])
        together = self.loss.smoothness(flat, self.rows.weights.reshape(1, -1) / self.clients)
        return Constants(
            tuple(local.tolist()),
            (self.l2,) * self.clients,
            tuple(self.counts.tolist()),
            self.layout,
            float(together[0]) + extra,
        )

    def fingerprint(self) -> str:
        """Tells this problem from others when a run is resumed: a checksum of data and settings."""
        check = zlib.crc32(f"{self.name} {self.loss!r} {self.l2} {self.nonconvex}".encode())
        for tensor in (self.rows.x, self.rows.y, self.rows.weights):
            check = zlib.crc32(tensor.contiguous().numpy().tobytes(), check)
        return f"{self.name}, checksum {check:08x}"

    def mean_value(self, w: Tensor) -> float:
        """`f(w)`."""
        return float(self.value(w).double().mean())

    def mean_gradient(self, w: Tensor) -> Tensor:
        """`grad f(w)`."""
        return self.gradient(w).mean(0)

    def evaluate(self, w: Tensor) -> dict[str, float]:
        """On the test set: accuracy, or R2 for regression. Empty without a test set."""
        return {} if self.test is None else self._score(w.unsqueeze(0), self.test)

    def evaluate_personal(self, w: Tensor) -> dict[str, float]:
        """Every client's own model `[C, d]` on its own test rows, averaged over clients."""
        if self.client_test is None:
            return {}
        return {f"personal_{k}": v for k, v in self._score(w, self.client_test).items()}

    def _score(self, w: Tensor, rows: Rows) -> dict[str, float]:
        w = self.layout.gather(w)
        prediction, weights = self.loss.predict(w, rows.x), rows.weights.double()
        weights = weights / weights.sum(1, keepdim=True)
        if self.loss.task == "classification":
            return {"accuracy": float(((prediction == rows.y) * weights).sum(1).mean())}
        mean = (weights * rows.y).sum(1, keepdim=True)
        error = (weights * (prediction - rows.y).square()).sum(1)
        spread = (weights * (rows.y - mean).square()).sum(1)
        return {"r2": float((1 - error / spread).mean())}

    def _spread(self, w: Tensor) -> Tensor:
        w = self.layout.gather(w)
        return w if w.dim() == 2 else w.expand(self.clients, -1)

    def _penalty(self, w: Tensor) -> Tensor:
        square = w.square()
        return self.l2 / 2 * square.sum(1) + self.nonconvex * (square / (1 + square)).sum(1)

    def _take(self, index: Tensor, weights: Tensor) -> Rows:
        row = torch.arange(self.clients).unsqueeze(1)
        return Rows(self.rows.x[row, index], self.rows.y[row, index], weights.to(self.dtype))
