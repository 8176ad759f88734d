"""Client samplings of SPPM-AS, all as one two-stage draw, with their exact constants.

Cohort Squeeze (thesis chapter 5, section 5.3 and appendix D.2.3): first some of the blocks of a
clustering are chosen, then some clients of each. Full, non-uniform, nice, block and stratified
sampling and the two modes of thesis Algorithm 14 are all of this form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb, prod

import numpy as np
import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.protocol import check
from symprune.fed.randomness import Stream

SAMPLINGS = ("full", "uniform", "importance", "nonuniform", "nice", "block", "stratified")
CLUSTERED = ("block", "stratified")


@dataclass(frozen=True)
class Sampling:
    """`take` of the blocks uniformly without replacement (or one block with `chances`), then `each`
    of every chosen block's clients uniformly (None: all of them; a smaller block gives all)."""

    blocks: tuple[tuple[int, ...], ...]
    take: int
    each: int | None = None
    chances: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        members = sorted(client for block in self.blocks for client in block)
        check(members == list(range(len(members))), "Blocks must hold every client exactly once.")
        check(all(self.blocks), "A block of clients is empty.")
        inside = 1 <= self.take <= len(self.blocks)
        check(inside, f"Cannot take {self.take} of {len(self.blocks)} blocks.")
        check(self.each is None or self.each >= 1, f"Cannot take {self.each} clients of a block.")
        if self.chances is not None:
            fits = len(self.chances) == len(self.blocks) and self.take == 1
            check(fits, f"{len(self.chances)} chances were given for {len(self.blocks)} blocks.")
            positive = min(self.chances) > 0 and abs(sum(self.chances) - 1) < 1e-9
            check(positive, "Sampling chances must be positive and sum to 1.")

    @property
    def n(self) -> int:
        return sum(len(block) for block in self.blocks)

    def chosen(self, j: int) -> int:
        """How many clients of block j join when it is taken."""
        return len(self.blocks[j]) if self.each is None else min(self.each, len(self.blocks[j]))

    def block_chance(self, j: int) -> float:
        return self.take / len(self.blocks) if self.chances is None else self.chances[j]

    @property
    def probability(self) -> Tensor:
        """`p_i`, the chance that client i is in the cohort, float64 `[n]`."""
        p = torch.empty(self.n, dtype=torch.float64)
        for j, block in enumerate(self.blocks):
            p[torch.tensor(block)] = self.block_chance(j) * self.chosen(j) / len(block)
        return p

    @property
    def weights(self) -> Tensor:
        """`1 / (n p_i)`: with them the cohort's objective is unbiased."""
        return 1 / (self.n * self.probability)

    def draw(self, stream: Stream) -> Tensor:
        """A cohort, ascending client numbers."""
        q = len(self.blocks)
        if self.chances is None:
            taken = stream.permutation(q)[0, : self.take].tolist()
        else:
            edges = np.cumsum(self.chances)[:-1]
            taken = [int(np.searchsorted(edges, float(stream.uniform(1)), side="right"))]
        cohort: list[int] = []
        for j in sorted(taken):
            order = stream.permutation(len(self.blocks[j]))[0, : self.chosen(j)].tolist()
            cohort += [self.blocks[j][place] for place in order]
        return torch.tensor(sorted(cohort))

    def cohorts(self) -> Iterator[tuple[float, tuple[int, ...]]]:
        """Every cohort with its probability (exponentially many: for small n only)."""
        q = len(self.blocks)
        for taken in combinations(range(q), self.take):
            chance = self.block_chance(taken[0]) if self.take == 1 else 1 / comb(q, self.take)
            ways = prod(comb(len(self.blocks[j]), self.chosen(j)) for j in taken)
            for parts in product(*(combinations(self.blocks[j], self.chosen(j)) for j in taken)):
                yield chance / ways, tuple(sorted(sum(parts, ())))

    def strong_convexity(self, mu: Sequence[float]) -> float:
        """`mu_AS = min over cohorts of sum_i mu_i / (n p_i)`: the weakest clients of the weakest
        blocks."""
        strength = []
        for j, block in enumerate(self.blocks):
            m = self.chosen(j)
            weakest = sum(sorted(mu[i] for i in block)[:m])
            strength.append(weakest * len(block) / (self.n * self.block_chance(j) * m))
        return sum(sorted(strength)[: self.take])

    def variance(self, gradients: Tensor) -> float:
        """`sigma2_AS = E ||sum_{i in S} a_i / (n p_i)||^2` from `a_i = grad f_i(x*)`, `[n, d]`.

        Exact for both stages: the spread of the block sums plus the spread inside the blocks, each
        with the factor (N - m)/(N - 1) of drawing m of N without replacement. For stratified
        sampling this is (1/n^2) sum_j |C_j|^2 var_j, tighter than the bound of thesis Lemma 5.3.3.
        """
        a, q, inside, sums = gradients.double(), len(self.blocks), 0.0, []
        for j, block in enumerate(self.blocks):
            size, m, chance = len(block), self.chosen(j), self.block_chance(j)
            own = a[list(block)]
            spread = float((own - own.mean(0)).square().sum(1).mean())
            left = (size - m) / (size - 1) if size > 1 else 0.0
            inside += size**2 * spread * left / (m * self.n**2 * chance)
            sums.append(own.sum(0) / (self.n * chance))
        total = torch.stack(sums)
        if self.take == 1:
            chances = torch.tensor([self.block_chance(j) for j in range(q)], dtype=a.dtype)
            return inside + float((chances * total.square().sum(1)).sum())
        mean = total.mean(0)
        spread = float((total - mean).square().sum(1).mean())
        return (
            inside
            + self.take * spread * (q - self.take) / (q - 1)
            + self.take**2 * float(mean @ mean)
        )


def make_sampling(
    name: str,
    n: int,
    size: int | None = None,
    labels: Sequence[int] | None = None,
    chances: Sequence[float] | None = None,
    mu: Sequence[float] | None = None,
) -> Sampling:
    """The sampling of this name. `size` is the cohort size of nice sampling, how many strata take
    part (stratified; None: all) or how many clients of the block (block; None: all). `labels` is
    every client's cluster; `chances` those of nonuniform sampling or of the blocks."""
    check(name in SAMPLINGS, f"Unknown sampling {name!r}; choose from {', '.join(SAMPLINGS)}.")
    everyone = tuple(range(n))
    if name == "full":
        return Sampling((everyone,), 1)
    if name == "nice":
        check(size is not None and 1 <= size <= n, f"Nice sampling cannot draw {size} of {n}.")
        return Sampling((everyone,), 1, size)
    if name in CLUSTERED:
        if labels is None or len(labels) != n:
            raise SympruneError(f"{name} sampling needs {n} cluster labels.")
        blocks = tuple(tuple(i for i in everyone if labels[i] == c) for c in sorted(set(labels)))
        if name == "stratified":
            return Sampling(blocks, len(blocks) if size is None else min(size, len(blocks)), 1)
        return Sampling(blocks, 1, size, None if chances is None else tuple(chances))
    alone = tuple((i,) for i in everyone)
    if name == "uniform":
        return Sampling(alone, 1)
    if name == "importance":
        if mu is None or min(mu) <= 0:
            raise SympruneError("Importance sampling needs every client's mu_i > 0.")
        chances = [m / sum(mu) for m in mu]
    if chances is None:
        raise SympruneError("Nonuniform sampling needs the clients' chances.")
    return Sampling(alone, 1, None, tuple(chances))


def cluster(sketches: Tensor, clusters: int, seed: int) -> Tensor:
    """k-means labels of the rows `[n, F]`, int64 `[n]`, numbered in order of appearance."""
    from sklearn.cluster import KMeans

    fitted = KMeans(min(clusters, len(sketches)), random_state=seed, n_init=10)
    labels = fitted.fit(sketches.double().cpu().numpy()).labels_
    first = {label: place for place, label in enumerate(dict.fromkeys(labels.tolist()))}
    return torch.tensor([first[label] for label in labels.tolist()])
