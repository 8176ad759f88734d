"""Random numbers that depend on who draws them and when, and on nothing else.

A number is a hash (splitmix64) of the seed, the round, the purpose, the client and a counter. So
a client draws the same numbers alone on its own machine as in a stack of a thousand, a resumed run
needs no saved generator, and drawing for many clients is a few array operations.
"""

from __future__ import annotations

import math
import os
import zlib

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError

LARGEST_SEED = 2**32
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def check_seed(seed: int) -> None:
    """Refuse what is no seed: splits and models are drawn by generators that take no other."""
    if not 0 <= seed < LARGEST_SEED:
        raise SympruneError(f"A seed is from 0 to {LARGEST_SEED - 1}, not {seed}.")


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Stream:
    """A source of random numbers with one row per client; each draw moves it on."""

    def __init__(self, key: np.ndarray) -> None:
        self.key = key
        self.count = 0

    @classmethod
    def of(
        cls, seed: int, round_number: int, purpose: str, clients: Tensor | None = None
    ) -> Stream:
        """The stream of these clients (one row each), or of the server when there are none."""
        who = np.zeros(1, np.uint64)
        if clients is not None:
            who = clients.cpu().numpy().astype(np.uint64) + 1
        key = _mix(np.array([seed & (2**64 - 1)], np.uint64) + GOLDEN)
        for part in ([round_number], [zlib.crc32(purpose.encode())], who):
            key = _mix(key ^ (np.asarray(part, np.uint64) * GOLDEN + np.uint64(1)))
        return cls(key)

    @property
    def rows(self) -> int:
        return len(self.key)

    def bits(self, *shape: int) -> np.ndarray:
        """Uniform 64-bit integers `[rows, *shape]`."""
        size = math.prod(shape)
        counter = np.arange(self.count + 1, self.count + size + 1, dtype=np.uint64)
        self.count += size
        return _mix(self.key[:, None] + counter * GOLDEN).reshape(self.rows, *shape)

    def by_row(self) -> list[Stream]:
        """A stream for each row alone, which draws what the row would have drawn."""
        alone = [Stream(self.key[row : row + 1]) for row in range(self.rows)]
        for stream in alone:
            stream.count = self.count
        return alone

    def uniform(self, *shape: int) -> Tensor:
        """float64 in [0, 1), `[rows, *shape]`."""
        drawn = torch.from_numpy((self.bits(*shape) >> np.uint64(11)) * 2.0**-53)
        return drawn.to(torch.get_default_device())

    def normal(self, *shape: int) -> Tensor:
        """Standard normal float64 `[rows, *shape]`, from the inverse error function."""
        return math.sqrt(2) * torch.erfinv(2 * (self.uniform(*shape) + 2.0**-54) - 1)

    def integers(self, high: int | Tensor, *shape: int) -> Tensor:
        """int64 in [0, high), `[rows, *shape]`; `high` may differ by row (shaped to broadcast)."""
        return (self.uniform(*shape) * high).long()

    def permutation(self, size: int) -> Tensor:
        """A random order of `range(size)` per row, int64 `[rows, size]`."""
        return self.uniform(size).argsort(dim=1, stable=True)

    def generator(self) -> torch.Generator:
        """A torch generator seeded from the first row, for code that wants one."""
        return torch.Generator().manual_seed(int(self.bits(1)[0, 0] >> np.uint64(1)))


class SystemStream(Stream):
    """The same from the operating system's cryptographic generator: nobody can draw it again."""

    def __init__(self, rows: int) -> None:
        super().__init__(np.zeros(rows, np.uint64))

    def by_row(self) -> list[Stream]:
        return [SystemStream(1) for _ in range(self.rows)]

    def bits(self, *shape: int) -> np.ndarray:
        count = self.rows * math.prod(shape)
        return np.frombuffer(os.urandom(8 * count), np.uint64).reshape(self.rows, *shape)


Random = torch.Generator | Stream


def uniform_like(x: Tensor, random: Random) -> Tensor:
    """Uniform numbers of x's shape; from a stream, row i of x gets its numbers from row i."""
    if isinstance(random, Stream):
        rows = x if x.dim() > 1 else x.unsqueeze(0)
        return random.uniform(*rows.shape[1:]).view(x.shape)
    return torch.rand(x.shape, generator=random, dtype=torch.float64)
