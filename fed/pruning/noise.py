"""Clip-and-noise: a client's statistics of a block as one differentially private release.

A sample's vector is measured against public text that both sides know: how far each sum is from the
public one, in units of the public one. That difference is clipped to the length `clip sqrt(d)` and
the sum over samples gets Gaussian noise (the Gaussian mechanism; blocks compose adaptively). What
the server makes of the noisy sum is post-processing and costs nothing: it shrinks each part towards
the public statistics by the share of its variation that is noise, so that strong noise ends in
pruning with public text, not in random masks.

Adjacent are two data sets of which one has a sample (a window of tokens) where the other has none;
the number of samples is public.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed import privacy
from symprune.fed.pruning.packed_stats import Packed, Part, length
from symprune.stats import SQUARE, TOTAL

FLOOR = 1e-3
LEAST_SQUARE = 1e-2


@dataclass(frozen=True)
class Privacy:
    """What is promised for every sample of every client: all it sends is (epsilon, delta)-private.

    clip is the root mean square, over a block's statistics, of a sample's relative difference to
    public text beyond which it is scaled down; before that no single difference counts for more
    than twice as much, so that a few channels of an odd sample do not silence the others.
    """

    epsilon: float
    delta: float = 1e-5
    clip: float = 0.5

    def __post_init__(self) -> None:
        if not self.epsilon > 0 or not math.isfinite(self.epsilon):
            raise SympruneError(f"epsilon must be above 0, not {self.epsilon}.")
        if not 0 < self.delta < 1:
            raise SympruneError(f"delta must be between 0 and 1, not {self.delta}.")
        if not self.clip > 0 or not math.isfinite(self.clip):
            raise SympruneError(f"clip must be above 0, not {self.clip}.")

    def multiplier(self, blocks: int) -> float:
        """The noise of one block in units of the clipping length, for all blocks together."""
        return privacy.noise_multiplier(self.epsilon, self.delta, 1.0, blocks)


def reference(parts: Sequence[Part], public: Packed) -> tuple[Tensor, Tensor]:
    """Centre and scale of every statistic: its mean over public samples, and its usual size."""
    centres, scales, at = [], [], 0
    for part, samples in zip(parts, public.counts[:, 0].tolist(), strict=True):
        names, width = part.sums, part.channels
        mean = public.values[at : at + part.size].view(len(names), width) / max(samples, 1)
        means = dict(zip(names, mean, strict=True))
        size = {name: _usual(means[name]) for name in names if name != TOTAL}
        if TOTAL in means:
            size[TOTAL] = torch.maximum(means[TOTAL].abs(), size[SQUARE].sqrt())
        centres += [means[name] for name in names]
        scales += [size[name] for name in names]
        at += part.size
    return torch.cat(centres).float(), torch.cat(scales).float()


def _usual(squares: Tensor) -> Tensor:
    """The size of sums of squares, above zero in a channel where public text has none."""
    return squares + FLOOR * squares.mean() + torch.finfo(torch.float32).tiny


def clip_difference(values: Tensor, centre: Tensor, scale: Tensor, clip: float) -> Tensor:
    """One sample's relative difference to the centre, no longer than `clip sqrt(d)`."""
    difference = ((values - centre.double()) / scale.double()).clamp(-2 * clip, 2 * clip)
    longest = clip * math.sqrt(max(difference.numel(), 1))
    return difference * min(1.0, longest / max(float(difference.norm()), 1e-300))


def noisy(total: Tensor, multiplier: float, clip: float, generator: np.random.Generator) -> Tensor:
    """The sum of clipped differences with the mechanism's noise."""
    deviation = multiplier * clip * math.sqrt(max(total.numel(), 1))
    return total + torch.from_numpy(generator.normal(0.0, deviation, total.numel()))


def estimate(
    parts: Sequence[Part],
    noisy_sum: Tensor,
    centre: Tensor,
    scale: Tensor,
    samples: int,
    tokens: int,
    deviation: float,
    clip: float,
) -> Packed:
    """Statistics from the noisy sum over all clients, whose noise has this standard deviation."""
    mean = noisy_sum / samples
    noise_variance = (deviation / samples) ** 2
    values, at = torch.empty_like(mean), 0
    for part in parts:
        for name in part.sums:
            here = slice(at, at + part.channels)
            # Three deviations above its mean, noise alone has this power: below it, all is noise.
            ceiling = noise_variance * (1 + 3 * math.sqrt(2 / part.channels))
            power = float(mean[here].square().mean())
            share = max(0.0, 1 - ceiling / power) if power > 0 else 0.0
            difference = (share * mean[here]).clamp(-2 * clip, 2 * clip)
            public = centre[here].double()
            values[here] = public + scale[here].double() * difference
            if name != TOTAL:
                values[here] = torch.maximum(values[here], LEAST_SQUARE * public)
            at += part.channels
    counts = torch.tensor([[samples, tokens]] * len(parts), dtype=torch.int64).view(-1, 2)
    return Packed(counts, values * samples, torch.zeros(length(parts), dtype=torch.float64))
