"""The problem all algorithms solve: `min_w (1/n) sum_i f_i(w)`, client i holding f_i.

A `Problem` is a stack of clients: data padded to one shape with row weights, a loss, a regulariser.
`problem.select(rows)` is the same problem seen by some of the clients, so a client function written
for the stack runs alone on one machine. Constants L_i and mu_i feed the theorems' step sizes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from symprune.errors import SympruneError
from symprune.fed.problems.layout import FlatLayout, keep_layout
from symprune.fed.problems.losses import Loss
from symprune.fed.problems.masked import KeptWeights, place_loss, refuse_unpruned, restrict
from symprune.fed.problems.models.causal_lm import (
    LANGUAGE,
    ROWS_AT_ONCE,
    CausalLM,
    Text,
    cut_windows,
    token_weights,
)
from symprune.fed.problems.rows import Rows, stack_rows
from symprune.fed.randomness import LARGEST_SEED, Stream

__all__ = ["Constants", "Problem", "Rows", "stack_rows"]  # with the rows it is made of


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
    words: bytes = b""  # the digest of the tokenizer of its text, if it is known

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
    def closed_form(self) -> bool:
        """Whether value and gradient are short formulas, as those of linear models are."""
        return hasattr(self.loss, "smoothness")

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.weights.dtype

    @property
    def device(self) -> torch.device:
        return self.rows.weights.device

    def to(self, device: str | torch.device) -> Problem:
        """The same problem with its rows and its model on this device; a run of it lives there."""
        move = lambda rows: None if rows is None else rows.on(device)  # noqa: E731
        return replace(
            self,
            loss=place_loss(self.loss, device),
            rows=self.rows.on(device),
            test=move(self.test),
            client_test=move(self.client_test),
        )

    def initial(self, seed: int = 0) -> Tensor:
        """The usual start: zero for the linear models, the module's own initialisation else."""
        return self.loss.initial(seed).to(self.device, self.dtype)

    def select(self, rows: Tensor | slice) -> Problem:
        """The same problem for the clients at these places of the stack."""
        own = None if self.client_test is None else self.client_test[rows]
        return replace(self, rows=self.rows[rows], client_test=own, ids=self.numbers[rows])

    @staticmethod
    def causal_lm(
        model: nn.Module,
        texts: Sequence[Text],
        *,
        tokenizer: Any = None,
        length: int = 128,
        test: Text | None = None,
        client_tests: Sequence[Text] | None = None,
        exempt: Sequence[str] = (),
        l2: float = 0.0,
        weighting: str = "mean",
        rows_at_once: int = ROWS_AT_ONCE,
        masks: Mapping[str, Tensor] | None = None,
        name: str | None = None,
    ) -> Problem:
        """The clients' texts and a causal language model, fine-tuned from its own weights.

        model: a HuggingFace model, on any device; what wants no gradient is not trained. texts: one
        per client, a string, a list of strings, or tokens (see `cut_windows`). tokenizer: for
        strings. length: tokens of a window. test, client_tests: text that models are judged by, one
        for all and one for each. exempt: patterns such as *embed* and *norm* of parameters that are
        not trained. l2, weighting: as in `make_problem`. rows_at_once: windows in one pass.
        masks: the problem is one in the weights that they keep. name: of the problem."""
        loss = CausalLM(model, tuple(exempt), rows_at_once)

        def cut(some: Sequence[Text], how: str) -> Rows:
            rows = stack_rows([cut_windows(text, length, tokenizer) for text in some], how)
            loss.check_tokens(rows.x)
            dtype = loss.own_start().dtype
            return replace(rows, weights=token_weights(rows.weights, rows.y, length)).to(dtype)

        if client_tests is not None and len(client_tests) != len(texts):
            raise SympruneError(f"{len(client_tests)} tests for {len(texts)} clients.")
        problem = Problem(
            loss,
            cut(texts, weighting),
            l2,
            test=None if test is None else cut([test], "mean"),
            client_test=None if client_tests is None else cut(client_tests, "mean"),
            name=name or f"text ({type(model).__name__}, {len(texts)} clients)",
        )
        return problem if masks is None else problem.masked(masks)

    def masked(self, masks: Mapping[str, Tensor]) -> Problem:
        """The same problem in the weights that the masks keep, such as a `MaskSet`'s: the others
        are zero and nobody's concern. Vectors of the whole model are cut to the kept weights."""
        if self.layout.digest:
            raise SympruneError(f"{self.name} has masks already.")
        fixed = getattr(self.loss, "fixed", {})
        refuse_unpruned(fixed, masks)
        trained = {name: masks[name] for name in masks if name not in fixed}
        layout = keep_layout(self.layout, trained)
        return replace(self, loss=restrict(self.loss, layout))

    def unmasked(self) -> Problem:
        """The problem in all weights, whatever is kept."""
        loss = self.loss.loss if isinstance(self.loss, KeptWeights) else self.loss
        return replace(self, loss=loss)

    def value(self, w: Tensor, batch: Rows | None = None) -> Tensor:
        """`f_i(w_i)` for every client, `[C]`; `w` is `[C, d]` or one `[d]` for all."""
        w = self._spread(w)
        return self._by_size(self.loss.value, w, batch or self.rows, ()) + self._penalty(w)

    def gradient(self, w: Tensor, batch: Rows | None = None) -> Tensor:
        """`grad f_i(w_i)` for every client, `[C, d]`, on all rows or on a batch of each."""
        w, rows = self._spread(w), batch or self.rows
        if rows.seeds is None:
            gradient = self._by_size(self.loss.gradient, w, rows, w.shape[1:])
        else:
            gradient = self.loss.noisy_gradient(  # type: ignore[attr-defined]
                w, rows.x, rows.y, rows.weights, rows.seeds
            )
        if self.l2:
            gradient = gradient + self.l2 * w
        if self.nonconvex:
            gradient = gradient + self.nonconvex * 2 * w / (1 + w.square()).square()
        return gradient

    def batch(self, stream: Stream, size: int) -> Rows:
        """`size` rows of each client drawn uniformly with replacement: an unbiased gradient."""
        index = stream.integers(self.counts.unsqueeze(1), size)
        share = self.rows.weights.sum(1, keepdim=True) / size
        return self._take(index, share.expand(-1, size), self._seeds(stream))

    def step_rows(self, stream: Stream, size: int | None) -> Rows | None:
        """What a training step's gradient is of: a batch, or, without a size, all rows, with seeds
        where there is dropout."""
        if size is not None:
            return self.batch(stream, size)
        return replace(self.rows, seeds=self._seeds(stream)) if self._draws else None

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
            rows = self._take(index, valid * (total / held), self._seeds(stream))
            yield rows, valid.any(1)

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
            check = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), check)
        return f"{self.name}, checksum {check:08x}"

    def mean_value(self, w: Tensor) -> float:
        """`f(w)`."""
        return float(self.value(w).double().mean())

    def mean_gradient(self, w: Tensor) -> Tensor:
        """`grad f(w)`."""
        return self.gradient(w).mean(0)

    def evaluate(self, w: Tensor) -> dict[str, float]:
        """On the test set: accuracy, R2 for regression, perplexity for text. Empty without one."""
        return {} if self.test is None else self._score(w.unsqueeze(0), self.test)

    def evaluate_each(self, w: Tensor) -> list[dict[str, float]]:
        """One model on every client's own test rows, client by client."""
        own = self.client_test
        if own is None:
            return []
        return [self._score(w.unsqueeze(0), own[i : i + 1]) for i in range(self.clients)]

    def evaluate_personal(self, w: Tensor) -> dict[str, float]:
        """Every client's own model `[C, d]` on its own test rows, averaged over clients."""
        if self.client_test is None:
            return {}
        return {f"personal_{k}": v for k, v in self._score(w, self.client_test).items()}

    def _score(self, w: Tensor, rows: Rows) -> dict[str, float]:
        w = self.layout.gather(w)
        if self.loss.task == LANGUAGE:
            losses = self.loss.value(w, rows.x, rows.y, rows.weights)
            return {"perplexity": float(losses.double().exp().mean())}
        prediction, weights = self.loss.predict(w, rows.x), rows.weights.double()
        weights = weights / weights.sum(1, keepdim=True)
        if self.loss.task == "classification":
            return {"accuracy": float(((prediction == rows.y) * weights).sum(1).mean())}
        mean = (weights * rows.y).sum(1, keepdim=True)
        error = (weights * (prediction - rows.y).square()).sum(1)
        spread = (weights * (rows.y - mean).square()).sum(1)
        return {"r2": float((1 - error / spread).mean())}

    def _by_size(
        self,
        function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        w: Tensor,
        rows: Rows,
        shape: tuple[int, ...],
    ) -> Tensor:
        """`function(w, x, y, weights)`, one `shape` a client, zero for a client without rows."""
        found = [(at, function(w[at], own.x, own.y, own.weights)) for at, own in rows.buckets]
        if len(found) == 1 and isinstance(found[0][0], slice):
            return found[0][1]
        out = w.new_zeros(len(w), *shape)
        for at, part in found:
            out[at] = part
        return out

    def _spread(self, w: Tensor) -> Tensor:
        w = self.layout.gather(w)
        return w if w.dim() == 2 else w.expand(self.clients, -1)

    def _penalty(self, w: Tensor) -> Tensor:
        if not self.l2 and not self.nonconvex:
            return w.new_zeros(len(w))
        square = w.square()
        return self.l2 / 2 * square.sum(1) + self.nonconvex * (square / (1 + square)).sum(1)

    @cached_property
    def _draws(self) -> bool:
        """Whether a training step draws random numbers of its own, for dropout."""
        draws = getattr(self.loss, "draws", None)
        return draws is not None and draws(self.rows.x[0, :1])

    def _seeds(self, stream: Stream) -> Tensor | None:
        """A seed for every client, where one is needed."""
        return stream.integers(LARGEST_SEED, 1).squeeze(1) if self._draws else None

    def _take(self, index: Tensor, weights: Tensor, seeds: Tensor | None) -> Rows:
        row = torch.arange(self.clients).unsqueeze(1)
        x, y = self.rows.x[row, index], self.rows.y[row, index]
        return Rows(x, y, weights.to(self.dtype), seeds)
