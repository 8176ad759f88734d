"""Activation statistics of a layer: add a batch, merge two, reduce over processes.

What Wanda's, RIA's and DSnoT's published numbers rest on. Over N samples of T_n tokens each:
    norm      x_i  with  x_i^2 = (1/N) sum_n sum_t X[n,t,i]^2
    mean      m_i = (1/N) sum_n sum_t X[n,t,i]    (DSnoT's E[X]: summed over tokens)
    variance  v_i = sum_n T_n Var_t X[n,:,i] / sum_n T_n    (population, within samples)
    gram      G = sum_n X[n]^T X[n]
All are functions of sums over samples, so two partial results add up to the whole. A sample is
summed in fp32; samples are added in fp64, so that neither their order nor how they were split over
batches, processes or clients shows in the fp32 results. Knows tensors only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from symprune.errors import SympruneError

SQUARE = "square"
MOMENTS = "moments"
GRAM = "gram"
STRIPE, MOST_STRIPES = 256, 8  # of channels, in which the symmetric half of a Gram is added up


class ChannelStats:
    """Additive statistics over the channels (the last dimension) of what passes through a layer."""

    def __init__(
        self,
        channels: int,
        collect: Iterable[str] = (SQUARE,),
        device: torch.device | str = "cpu",
        gram_device: str = "auto",
    ) -> None:
        self.channels = channels
        self.collect = frozenset(collect)
        unknown = self.collect - {SQUARE, MOMENTS, GRAM}
        if unknown:
            raise SympruneError(f"Unknown statistic {min(unknown)!r}.")
        self.samples = 0
        self.tokens = 0
        names = [SQUARE] if self.collect & {SQUARE, MOMENTS} else []
        names += ["total", "total_square"] if MOMENTS in self.collect else []
        self.sums = {n: torch.zeros(channels, dtype=torch.float64, device=device) for n in names}
        if GRAM in self.collect:
            self.sums[GRAM] = _square(channels, device if gram_device == "auto" else gram_device)

    @torch.no_grad()
    def add(self, batch: Tensor) -> None:
        """Add `[..., tokens, channels]`; every leading index is a sample of its own."""
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
            self.sums[SQUARE] += (x * x).sum(1).double().sum(0)
        if MOMENTS in self.collect:
            total = x.sum(1).double()
            self.sums["total"] += total.sum(0)
            self.sums["total_square"] += (total * total / tokens).sum(0)
        if GRAM in self.collect:
            self._add_gram(x.reshape(-1, self.channels))

    def _add_gram(self, x: Tensor) -> None:
        """Only the blocks on and above the diagonal; `gram` mirrors them."""
        gram = self.sums[GRAM]
        for start, end in self._stripes():
            part, block = gram[start:end, start:], x[:, start:end].T
            if gram.device == x.device:
                part.addmm_(block, x[:, start:])
            else:
                part += (block @ x[:, start:]).to(gram.device)

    def _stripes(self) -> list[tuple[int, int]]:
        width = -(-self.channels // max(1, min(MOST_STRIPES, self.channels // STRIPE)))
        return [
            (start, min(start + width, self.channels)) for start in range(0, self.channels, width)
        ]

    def merge(self, other: ChannelStats) -> None:
        """Add another part's sums to these."""
        if (other.channels, other.collect) != (self.channels, self.collect):
            raise SympruneError("Only statistics of the same channels and kind can be merged.")
        self.samples += other.samples
        self.tokens += other.tokens
        for name, value in other.sums.items():
            self.sums[name] += value.to(self.sums[name].device)

    def all_reduce(self) -> None:
        """Add up over all processes of the default group; nothing to do when there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        device = next(iter(self.sums.values())).device if self.sums else torch.device("cpu")
        counts = torch.tensor([self.samples, self.tokens], dtype=torch.int64, device=device)
        dist.all_reduce(counts)
        self.samples, self.tokens = (int(count) for count in counts)
        for value in self.sums.values():
            dist.all_reduce(value)

    def state(self) -> dict[str, Tensor]:
        """Everything as tensors: what a process or a client sends."""
        counts = torch.tensor([self.samples, self.tokens], dtype=torch.int64)
        return {"counts": counts, **self.sums}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state()` gave."""
        self.samples, self.tokens = (int(count) for count in state["counts"])
        for name, value in self.sums.items():
            value.copy_(state[name])

    @property
    def norm(self) -> Tensor:
        """x: root of the mean over samples of the sum of squares over tokens."""
        return (self.sums[SQUARE] / max(self.samples, 1)).sqrt().float()

    @property
    def mean(self) -> Tensor:
        """m: mean over samples of the sum over tokens."""
        return (self.sums["total"] / max(self.samples, 1)).float()

    @property
    def variance(self) -> Tensor:
        """v: token-weighted average of the variance within a sample."""
        within = (self.sums[SQUARE] - self.sums["total_square"]).clamp(min=0)
        return (within / max(self.tokens, 1)).float()

    @property
    def gram(self) -> Tensor:
        """G = X^T X, fp32."""
        gram = self.sums[GRAM]
        for start, end in self._stripes():
            gram[end:, start:end] = gram[start:end, end:].T
        return gram

    def is_finite(self) -> bool:
        """Whether no NaN or infinity came in."""
        return all(bool(torch.isfinite(value).all()) for value in self.sums.values())


def _square(width: int, device: torch.device | str) -> Tensor:
    """Zeros, fp32; on `disk` in a memory-mapped file that is gone when the tensor is."""
    if device != "disk":
        return torch.zeros(width, width, dtype=torch.float32, device=device)
    with tempfile.NamedTemporaryFile(prefix="symprune-gram-") as file:
        file.truncate(4 * width * width)
        return torch.from_file(file.name, shared=True, size=width * width).view(width, width)
