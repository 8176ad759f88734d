"""Clip-and-noise: a client's statistics of a block as one differentially private release.

A sample's vector is measured against public text that both sides know: how far each sum is from the
public one, in units of the public one. That difference is clipped to the length `clip sqrt(d)`, in
whole numbers, and the sum over samples gets discrete Gaussian noise (`mechanism.py`; blocks compose
adaptively). What
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

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed import privacy
from symprune.fed.mechanism import UNITS, Draw, clip_to_whole, release
from symprune.fed.pruning.aggregate.packed_stats import Packed, Part, length
from symprune.fed.secure import graph
from symprune.stats import SQUARE, TOTAL

FLOOR = 1e-3
LEAST_SQUARE = 1e-2


@dataclass(frozen=True)
class Privacy:
    """What is promised for every sample of every client: all it sends is (epsilon, delta)-private.

    clip is the root mean square, over a block's statistics, of a sample's relative difference to
    public text beyond which it is scaled down; before that no single difference counts for more
    than twice as much, so that a few channels of an odd sample do not silence the others.

    Behind a secure sum clients share the noise: honest is how many of them each may count on, None
    as many as every such sum has for sure. 1 is the whole noise from each.
    """

    epsilon: float
    delta: float = 1e-5
    clip: float = 0.5
    honest: int | None = None

    def __post_init__(self) -> None:
        if not self.epsilon > 0 or not math.isfinite(self.epsilon):
            raise SympruneError(f"epsilon must be above 0, not {self.epsilon}.")
        if not 0 < self.delta < 1:
            raise SympruneError(f"delta must be between 0 and 1, not {self.delta}.")
        if not self.clip > 0 or not math.isfinite(self.clip):
            raise SympruneError(f"clip must be above 0, not {self.clip}.")
        if self.honest is not None and self.honest < 1:
            raise SympruneError(f"honest must be 1 or more, not {self.honest}.")

    def sharing(self, clients: int, secure: bool) -> int:
        """On how many honest ones each of so many clients counts."""
        if not secure:
            if (self.honest or 1) > 1:
                raise SympruneError("Noise is shared behind a secure sum alone: add --secure-sum.")
            return 1
        sure = graph.assured_after_losses(clients)
        return check_sharing(sure if self.honest is None else self.honest, clients)

    def multiplier(self, blocks: int) -> float:
        """The noise of one block in units of the clipping length, for all blocks together."""
        return privacy.noise_multiplier(self.epsilon, self.delta, 1.0, blocks)


def check_sharing(honest: int, clients: int) -> int:
    """Refuse to count on more honest clients' noise than a sum of so many is sure to have."""
    sure = max(1, graph.assured(clients))
    if honest > sure:
        raise SympruneError(
            f"{honest} honest clients are to share the noise; in a sum of {clients} there may be "
            f"as few as {sure}."
        )
    return honest


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
    """One sample's relative difference to the centre, as whole numbers: none counts for more than
    twice the clip, and all together are no longer than `clip sqrt(d)`, which is `UNITS`."""
    difference = ((values - centre.double()) / scale.double() / clip).clamp(-2, 2)
    return clip_to_whole(difference / math.sqrt(max(difference.numel(), 1)))


def noisy(total: Tensor, share: float, draw: Draw) -> Tensor:
    """The sum of clipped differences with a client's noise: whole numbers still, so that sums of
    them are exact and tell nothing of how a client rounded."""
    return release(total, share, draw).double()


def in_differences(whole: Tensor, clip: float) -> Tensor:
    """What a sum of whole numbers means."""
    return whole * (clip * math.sqrt(max(whole.numel(), 1)) / UNITS)


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
