"""Activation statistics of a layer: add a batch, merge two, reduce over processes.

What Wanda's, RIA's and DSnoT's published numbers rest on. Over N samples of T_n tokens each:
    norm      x_i  with  x_i^2 = (1/N) sum_n sum_t X[n,t,i]^2
    mean      m_i = (1/N) sum_n sum_t X[n,t,i]    (DSnoT's E[X]: summed over tokens)
    variance  v_i = sum_n T_n Var_t X[n,:,i] / sum_n T_n    (population, within samples)
    gram      G = sum_n X[n]^T X[n]
    drift     D = sum_n (Z[n] - X[n])^T X[n]    (Z: what the dense model has in the place of X)
All are functions of sums over samples, so two partial results add up to the whole. A sample is
summed in fp32; samples are added as pairs of fp64 numbers, a sum and what its roundings lost. Such
a sum is exact while a channel's samples are within 20 orders of magnitude of each other, so neither
their order nor how they were split over batches, processes or clients shows in a bit of the result.
Gram matrix and drift are summed by `gram`, in another exact way. Knows tensors only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from symprune.errors import SympruneError
from symprune.gram import CrossSum, GramSum
from symprune.machine import host

SQUARE = "square"
MOMENTS = "moments"
GRAM = "gram"
DRIFT = "drift"
TOTAL, WITHIN = "total", "within"  # the sums `moments` are made of
SHRINK = 2.0  # times `noise`: how much less correlated than measured channels are taken to be
PIECE = 2**20  # of numbers that are squared at once: few enough to stay in the cache


@dataclass(frozen=True)
class Needs:
    """The statistics a run collects, of inputs and of outputs, how long a token may be, and whether
    the gradients of a block's output are measured, too."""

    inputs: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    token_limit: float | None = None
    gradients: bool = False

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs or self.gradients)

    @property
    def gram(self) -> bool:
        """Whether the calibration data itself is fitted, or an error on it reported."""
        return GRAM in self.inputs

    @property
    def watched(self) -> Needs:
        """What of it is collected of tokens that decide nothing."""
        return Needs(self.inputs & {GRAM, DRIFT}, token_limit=self.token_limit)


def limit_tokens(batch: Tensor, limit: float) -> Tensor:
    """`[..., tokens, channels]` with every token at most `limit` times as long as the median one of
    its sample."""
    x = torch.atleast_2d(batch).float()
    return x if x.numel() == 0 else x * token_scales(x, limit)


def token_scales(x: Tensor, limit: float) -> Tensor:
    """What `limit_tokens` multiplies each token of `[..., tokens, channels]`, fp32, with.

    Models park attention on a few tokens, the first of a window above all, whose activations are
    hundreds of times longer than the rest. In a sum of squares these few outweigh all text.
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    usual = length.median(-2, keepdim=True).values
    return torch.where(usual > 0, (limit * usual / length).clamp(max=1), torch.ones_like(length))


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and, exactly, what the rounding lost (Knuth's TwoSum)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


class ChannelStats:
    """Additive statistics over the channels (the last dimension) of what passes through a layer.

    Args:
        channels: How many there are.
        collect: Which statistics: `square` (for the norm), `moments` (mean and variance), `gram`
            and with it `drift`.
        device: Where the sums are, and batches are expected.
        gram_device: Where the Gram matrix is: with the other sums (`auto`), `cpu` or `disk`.
        gram_scale: What its parts agree on, see `GramSum`; if None, the first sample's.
    """

    def __init__(
        self,
        channels: int,
        collect: Iterable[str] = (SQUARE,),
        *,
        device: torch.device | str = "cpu",
        gram_device: str = "auto",
        gram_scale: Tensor | None = None,
    ) -> None:
        self.channels = channels
        self.device = torch.device(device)
        self.collect = frozenset(collect)
        unknown = self.collect - {SQUARE, MOMENTS, GRAM, DRIFT}
        if unknown:
            raise SympruneError(f"Unknown statistic {min(unknown)!r}.")
        self.samples = 0
        self.tokens = 0
        names = [SQUARE] if self.collect & {SQUARE, MOMENTS} else []
        names += [TOTAL, WITHIN] if MOMENTS in self.collect else []
        self.sums = {n: torch.zeros(channels, dtype=torch.float64, device=device) for n in names}
        self.rests = {n: torch.zeros_like(value) for n, value in self.sums.items()}
        self._gram: GramSum | None = None
        if GRAM in self.collect:
            there = device if gram_device == "auto" else gram_device
            self._gram = GramSum(channels, there, gram_scale)
            self.sums[GRAM] = self._gram.matrix
        self._drift: CrossSum | None = None
        if self._gram is not None and DRIFT in self.collect:
            self._drift = CrossSum(channels, self._gram.there)
            self.sums[DRIFT] = self._drift.matrix

    @torch.no_grad()
    def add(self, batch: Tensor, dense: Tensor | None = None) -> None:
        """Add `[..., tokens, channels]`; every leading index is a sample of its own. dense is what
        the dense model has in its place, for the drift."""
        if batch.shape[-1] != self.channels:
            raise SympruneError(f"Expected {self.channels} channels, got {batch.shape[-1]}.")
        if batch.numel() == 0:
            return
        x = torch.atleast_2d(batch).float()
        x = x.reshape(-1, *x.shape[-2:])
        samples, tokens = x.shape[0], x.shape[1]
        self.samples += samples
        self.tokens += samples * tokens
        if SQUARE in self.sums:
            self._accumulate(SQUARE, map(_energy, x))
        if MOMENTS in self.collect:
            for sample in x:
                total, within = _moments(sample)
                self._accumulate(TOTAL, [total])
                self._accumulate(WITHIN, [within])
        if self._gram is not None:
            for sample in x:
                self._gram.add(sample)
        if self._drift is not None:
            self._add_drift(x, dense)

    def _add_drift(self, x: Tensor, dense: Tensor | None) -> None:
        if dense is None or dense.numel() != x.numel():
            raise SympruneError("The dense model gives a layer other tokens than the pruned one.")
        scale = self.gram_scale
        assert self._drift is not None and scale is not None
        for sample, other in zip(x, dense.float().reshape(x.shape), strict=True):
            self._drift.add(other - sample, sample, scale)

    def _accumulate(self, name: str, values: Iterable[Tensor]) -> None:
        for value in values:
            self.sums[name], lost = two_sum(self.sums[name], value.to(self.sums[name].device))
            self.rests[name] += lost

    def merge(self, other: ChannelStats) -> None:
        """Add another part's sums to these."""
        if (other.channels, other.collect) != (self.channels, self.collect):
            raise SympruneError("Only statistics of the same channels and kind can be merged.")
        self.samples += other.samples
        self.tokens += other.tokens
        for name, rest in other.rests.items():
            self._accumulate(name, (other.sums[name], rest))
        if self._gram is not None and other._gram is not None:
            self._gram.merge(other._gram)
        if self._drift is not None and other._drift is not None:
            self._drift.merge(other._drift)

    def all_reduce(self) -> None:
        """Add up over all processes of the default group; nothing to do when there is none.

        What is sent is on the device of the activations: NCCL takes nothing else.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        counts = torch.tensor([self.samples, self.tokens], device=self.device)
        dist.all_reduce(counts)
        self.samples, self.tokens = counts.tolist()
        for name in self.rests:
            part = torch.stack([self.sums[name], self.rests[name]])
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, part)
            self.sums[name], self.rests[name] = torch.zeros_like(part)
            for each in parts:
                self._accumulate(name, each)
        if self._gram is not None:
            self._gram.all_reduce(self.device)
        if self._drift is not None:
            self._drift.all_reduce(self.device)

    def reorder(self, order: Tensor) -> None:
        """Channel order[i] becomes channel i."""
        for table in (self.sums, self.rests):
            for name in self.rests:
                table[name] = table[name].index_select(0, order.to(table[name].device))
        if self._gram is not None:
            self._gram.reorder(order)

    def state(self) -> dict[str, Tensor]:
        """Everything as tensors: what a process or a client sends."""
        counts = torch.tensor([self.samples, self.tokens], dtype=torch.int64)
        rests = {f"{name}_rest": value for name, value in self.rests.items()}
        gram = {} if self._gram is None else self._gram.state()
        if self._drift is not None:
            rests["drift_rest"] = self._drift.rests
        return {"counts": counts, **self.sums, **rests, **gram}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state()` gave."""
        self.samples, self.tokens = (int(count) for count in state["counts"])
        for name, rest in self.rests.items():
            self.sums[name].copy_(state[name])
            rest.copy_(state[f"{name}_rest"])
        if self._gram is not None:
            self._gram.load(state)
        if self._drift is not None:
            self._drift.matrix.copy_(state[DRIFT])
            self._drift.rests.copy_(state["drift_rest"])

    def _sum(self, name: str) -> Tensor:
        return self.sums[name] + self.rests[name]

    @property
    def norm(self) -> Tensor:
        """x: root of the mean over samples of the sum of squares over tokens."""
        return (self._sum(SQUARE) / max(self.samples, 1)).sqrt().float()

    @property
    def mean(self) -> Tensor:
        """m: mean over samples of the sum over tokens."""
        return (self._sum(TOTAL) / max(self.samples, 1)).float()

    @property
    def variance(self) -> Tensor:
        """v: token-weighted average of the variance within a sample."""
        return (self._sum(WITHIN) / max(self.tokens, 1)).float()

    @property
    def gram(self) -> Tensor:
        """G = X^T X, fp32 and symmetric to the last bit."""
        if self._gram is None:
            raise SympruneError("No Gram matrix was collected.")
        return self._gram.whole()

    def upper_gram(self) -> tuple[Tensor, Tensor]:
        """Half of G, exactly: see `GramSum.upper`."""
        if self._gram is None:
            raise SympruneError("No Gram matrix was collected.")
        return self._gram.upper()

    def load_upper_gram(self, sums: Tensor, rests: Tensor) -> None:
        """Take over what `upper_gram()` gave."""
        if self._gram is not None:
            self._gram.load_upper(sums, rests)

    @property
    def drift(self) -> Tensor:
        """D = (Z - X)^T X, fp32."""
        if self._drift is None:
            raise SympruneError("No drift was collected.")
        return self._drift.matrix

    @property
    def gram_scale(self) -> Tensor | None:
        """What other parts of this sum are to agree on; None before the first sample."""
        return None if self._gram is None else self._gram.scale

    @property
    def noise(self) -> float:
        """channels / tokens: the fewer tokens, the more of the correlations in G is chance."""
        return self.channels / max(self.tokens, 1)

    def finite(self) -> list[Tensor]:
        """Whether no NaN or infinity came in: true if all of these are."""
        return [host.finite(value) for value in self.sums.values()]

    def is_finite(self) -> bool:
        """Whether no NaN or infinity came in."""
        return all(host.bring(self.finite()))


def _energy(sample: Tensor) -> Tensor:
    """The sum over tokens of the squares: an fp32 number, in fp64."""
    pieces = sample.split(max(1, PIECE // sample.shape[1]))
    squares = torch.empty_like(pieces[0])
    sums = [torch.mul(piece, piece, out=squares[: len(piece)]).sum(0) for piece in pieces]
    return sum(sums[1:], sums[0]).double()


def _moments(sample: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over tokens, and that of the squared deviations from the sample's own mean: fp32
    numbers, in fp64.

    As a difference of two sums the second would drown in the rounding of a large mean. What the
    rounding of the mean itself adds is known by the sum of the deviations, and taken out.
    """
    total, tokens = sample.sum(0), len(sample)
    mean = total / tokens
    pieces = sample.split(max(1, PIECE // sample.shape[1]))
    buffer = torch.empty_like(pieces[0])
    rest, squares = torch.zeros_like(mean), torch.zeros_like(mean)
    for piece in pieces:
        deviation = torch.sub(piece, mean, out=buffer[: len(piece)])
        rest += deviation.sum(0)
        squares += deviation.square_().sum(0)
    return total.double(), (squares - rest * rest / tokens).clamp(min=0).double()
