"""Clients that take part by chance, as a compressor of all their messages together (EF-BV: thesis
chapter 2, appendix A)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.compressors import CompressionConstants
from symprune.fed.randomness import Random, uniform_like
from symprune.masks import keep_largest


@dataclass(frozen=True)
class Nice:
    """m-nice participation: m of n workers, chosen uniformly together, send `(n/m) x`; the others
    nothing. Acts on the stack of all workers; `omega` is a worker's, `omega_average` the mean's."""

    m: int
    n: int

    def __post_init__(self) -> None:
        if not 1 <= self.m <= self.n:
            raise SympruneError(f"Cannot choose {self.m} of {self.n} clients.")

    def choose(self, random: Random) -> Tensor:
        """The numbers of the m workers, in order."""
        return keep_largest(uniform_like(torch.empty(self.n), random), self.m).nonzero().squeeze(1)

    def compress(self, x: Tensor, random: Random) -> Tensor:
        out = torch.zeros_like(x)
        chosen = self.choose(random)
        out[chosen] = x[chosen] * (self.n / self.m)
        return out

    @property
    def omega(self) -> float:
        return (self.n - self.m) / self.m

    @property
    def omega_average(self) -> float:
        return 0.0 if self.n == self.m else (self.n - self.m) / (self.m * (self.n - 1))

    def after(
        self, constants: CompressionConstants, independent: bool = True
    ) -> tuple[CompressionConstants, float]:
        """Constants and average variance when the m workers send `C_i(x_i)`: the workers' own noise
        is divided by m when independent, and participation adds its own, which acts on `E C_i`."""
        mean = min((1 + constants.eta) ** 2, constants.moment)
        ratio = self.n / self.m
        omega = ratio * constants.omega + self.omega * mean
        noise = constants.omega / self.m if independent else constants.omega * ratio
        average = min(noise + self.omega_average * mean, omega)
        return replace(constants, omega=omega, moment=ratio * constants.moment), average
