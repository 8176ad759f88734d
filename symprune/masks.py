"""Score -> keep-mask: by row, by layer or N:M, with exact counts, and masks packed to bits.

A keep-mask is a boolean tensor of the score's shape: True stays, False is pruned. The lowest scores
go; among equal scores the one with the lower index goes first, so a mask depends on nothing but
the score. Counts are exact: what is asked for is what is removed. Knows tensors only.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from symprune.errors import SympruneError

GROUPS = ("row", "layer")
CACHED = 2**18  # numbers


@dataclass(frozen=True)
class Pattern:
    """N:M sparsity: of every `m` consecutive input channels of a row, `n` stay."""

    n: int
    m: int

    def __post_init__(self) -> None:
        if not 0 < self.n < self.m:
            raise SympruneError(
                f"Pattern {self.n}:{self.m} keeps {self.n} of {self.m} weights; "
                "it needs 0 < N < M, as in 2:4."
            )

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """`"2:4"` -> `Pattern(2, 4)`."""
        n, colon, m = str(text).partition(":")
        if not (colon and n.strip().isdigit() and m.strip().isdigit()):
            raise SympruneError(f"Pattern {text!r} is not of the form N:M, as in 2:4.")
        return cls(int(n), int(m))

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


def count_removed(size: int, sparsity: float) -> int:
    """`floor(size * sparsity)`, with the sparsity read as the decimal that was typed: 29 % of 100
    is 29, although `100 * 0.29` is a little less in binary."""
    if not 0 <= sparsity < 1:
        raise SympruneError(f"Sparsity {sparsity} is outside [0, 1).")
    return math.floor(size * Fraction(str(float(sparsity))))


def keep_by_row(score: Tensor, sparsity: float) -> Tensor:
    """Every row loses exactly `floor(in * sparsity)` weights (Wanda's and DSnoT's way)."""
    return drop_lowest(score, count_removed(score.shape[-1], sparsity))


def keep_by_layer(score: Tensor, sparsity: float) -> Tensor:
    """The whole matrix loses exactly `floor(numel * sparsity)` weights (RIA's way)."""
    return keep_count(score, count_removed(score.numel(), sparsity), "layer")


def count_removed_from(rows: int, columns: int, sparsity: float, group: str) -> int:
    """How many weights `keep_mask` takes from a matrix."""
    by_row = group == "row"
    return (
        rows * count_removed(columns, sparsity)
        if by_row
        else count_removed(rows * columns, sparsity)
    )


def keep_count(score: Tensor, count: int, group: str) -> Tensor:
    """The matrix loses exactly `count` weights: the lowest, or, by `row`, the lowest of every row,
    one more from the first rows when the count does not divide."""
    if 0 < count < score.numel():
        check_ordered(score)
    return keep_ordered(score, count, group)


def keep_ordered(score: Tensor, count: int, group: str) -> Tensor:
    """`keep_count` for a caller that knows its scores to be numbers."""
    if group == "layer":
        return drop_ordered(score.flatten(), count).view(score.shape)
    each, more = divmod(count, score.shape[0])
    if not more:
        return drop_ordered(score, each)
    return torch.cat([drop_ordered(score[:more], each + 1), drop_ordered(score[more:], each)])


def keep_nested(score: Tensor, pattern: Pattern, share: float) -> Tensor:
    """On the way to N:M: of what the pattern removes, the lowest `share` of every row is gone."""
    keep = keep_n_of_m(score, pattern)
    if share >= 1:
        return keep
    going = score.masked_fill(keep, torch.inf)
    return drop_ordered(going, int(share * pattern.sparsity * score.shape[-1]))


def keep_n_of_m(score: Tensor, pattern: Pattern) -> Tensor:
    """The `n` highest of every `m` consecutive entries of a row stay."""
    check_ordered(score)
    return highest_of_groups(score, pattern)


def highest_of_groups(score: Tensor, pattern: Pattern) -> Tensor:
    """`keep_n_of_m` for a caller that knows its scores to be numbers."""
    n, m = pattern.n, pattern.m
    if score.shape[-1] % m:
        raise SympruneError(
            f"Pattern {pattern} does not divide a row of {score.shape[-1]} input channels."
        )
    groups = score.reshape(-1, m)
    if m > 16:
        return drop_ordered(groups, m - n).view(score.shape)
    # The rank of each entry inside its small group, by comparing all pairs: no sort, any device.
    columns = groups.unbind(1)
    keep = torch.empty_like(groups, dtype=torch.bool)
    for j, mine in enumerate(columns):
        rank = torch.zeros_like(mine, dtype=torch.int8)
        for i, other in enumerate(columns):
            if i != j:
                rank += other <= mine if i < j else other < mine
        keep[:, j] = rank >= m - n
    return keep.view(score.shape)


def keep_mask(
    score: Tensor, sparsity: float, *, group: str = "row", pattern: Pattern | None = None
) -> Tensor:
    """The keep-mask of a recipe: True where a weight stays.

    Args:
        score: `[out, in]`; the lowest go, of equals those of lower index.
        sparsity: The fraction of every group that goes, in [0, 1).
        group: `row`, every row loses the same number, or `layer`, one threshold for the matrix.
        pattern: N of every M consecutive entries of a row stay; sparsity and group have no say.
    """
    if pattern is not None:
        return keep_n_of_m(score, pattern)
    if group == "row":
        return keep_by_row(score, sparsity)
    if group == "layer":
        return keep_by_layer(score, sparsity)
    raise SympruneError(f"Unknown group {group!r}; choose row or layer.")


def keep_largest(score: Tensor, count: int) -> Tensor:
    """Keep-mask of the `count` largest entries along the last dimension."""
    size = score.shape[-1]
    if not 0 <= count <= size:
        raise SympruneError(f"Cannot keep the {count} largest of {size} entries.")
    return drop_lowest(score, size - count)


def drop_lowest(score: Tensor, count: int) -> Tensor:
    """Keep-mask that drops exactly the `count` lowest entries along the last dimension."""
    if 0 < count < score.shape[-1]:
        check_ordered(score)
    return drop_ordered(score, count)


def check_ordered(score: Tensor) -> None:
    """Fail where an entry is NaN: it has no place among the others."""
    if score.device.type == "cpu" and not torch.isnan(score.sum()):
        return  # a sum is quicker than a look at every entry, and enough unless it is NaN itself
    if torch.isnan(score).any():
        raise SympruneError("A score is NaN, so its order is undefined.")


def drop_ordered(score: Tensor, count: int) -> Tensor:
    """`drop_lowest` of a score without NaN.

    Selection, not sorting: the count-th smallest value of each row is found, everything below it
    goes, and as many of its equals, lowest index first, as are still missing. An accelerator does
    all of it without the host having to wait.
    """
    size = score.shape[-1]
    if not 0 <= count <= size:
        raise SympruneError(f"Cannot drop {count} of {size} entries.")
    if count in (0, size):
        return torch.full_like(score, count == 0, dtype=torch.bool)
    threshold = kth_smallest(score, count).unsqueeze(-1)
    keep = score > threshold
    surplus = (size - count) - count_true(keep)
    # Entries equal to the threshold that must stay: the last ones, since low indices go first.
    if score.device.type != "cpu":
        equal = score == threshold
        until = equal.cumsum(-1, dtype=torch.int32 if size < 2**31 else torch.int64)
        return keep.logical_or_(equal & (until[..., -1:] - until < surplus.unsqueeze(-1)))
    short = surplus.view(-1).nonzero().squeeze(1)
    if short.numel():
        rows, equals = keep.view(-1, size), score.reshape(-1, size)[short]
        row, column = (equals == threshold.reshape(-1, 1)[short]).nonzero(as_tuple=True)
        found = torch.bincount(row, minlength=short.numel())
        place = torch.arange(row.numel(), device=row.device) - (found.cumsum(0) - found)[row]
        stays = place >= (found - surplus.view(-1)[short])[row]
        rows[short[row[stays]], column[stays]] = True
    return keep


def kth_smallest(score: Tensor, k: int) -> Tensor:
    """The k-th smallest value (k from 1) along the last dimension.

    numpy's selection is several times faster than `torch.kthvalue` on a CPU; the value is the same.
    Accelerators give each row of `kthvalue` to one of their many processors, so a single row, as
    long as a whole layer, is selected from in another way.
    """
    if score.device.type == "cpu" and score.dtype in (torch.float32, torch.float64):
        rows = score.detach().reshape(-1, score.shape[-1]).numpy()
        found = np.empty(len(rows), rows.dtype)
        # Few rows at a time: their copies stay in the cache. numpy selects side by side.
        at_once = min(len(rows), max(1, CACHED // rows.shape[1]))
        threads = min(torch.get_num_threads(), -(-len(rows) // at_once))
        copies = np.empty((threads, at_once, rows.shape[1]), rows.dtype)

        def select(thread: int) -> None:
            for start in range(thread * at_once, len(rows), threads * at_once):
                part = rows[start : start + at_once]
                copy = copies[thread, : len(part)]
                np.copyto(copy, part)
                copy.partition(k - 1, axis=-1)
                found[start : start + at_once] = copy[:, k - 1]

        if threads == 1:
            select(0)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(select, range(threads)))
        return torch.from_numpy(found).view(score.shape[:-1])
    if score.device.type != "cpu" and score.numel() == score.shape[-1]:
        return _kth_by_bits(score, k)
    return torch.kthvalue(score, k, dim=-1).values


def _kth_by_bits(score: Tensor, k: int) -> Tensor:
    """The k-th smallest value, found bit by bit from the highest: a bit is set if fewer than k
    entries are below what is found so far with it."""
    exact = score if score.dtype == torch.float64 else score.float()
    integers = torch.int64 if exact.dtype == torch.float64 else torch.int32
    lowest, highest = torch.iinfo(integers).min, torch.iinfo(integers).max
    bits = exact.contiguous().view(integers)
    keys = bits ^ ((bits >> (torch.iinfo(integers).bits - 1)) & highest)  # ordered as the values
    found = torch.full_like(keys[..., :1], lowest)
    for bit in (lowest, *(1 << place for place in reversed(range(highest.bit_length())))):
        higher = found ^ bit
        found = torch.where((keys < higher).sum(-1, keepdim=True) < k, higher, found)
    found = found ^ ((found >> (torch.iinfo(integers).bits - 1)) & highest)
    return found.view(exact.dtype).squeeze(-1).to(score.dtype)


def count_true(mask: Tensor) -> Tensor:
    """Number of True along the last dimension."""
    if mask.device.type == "cpu":
        return torch.as_tensor(np.count_nonzero(mask.numpy(), axis=-1), dtype=torch.int64)
    return mask.sum(-1)


def pack_bits(mask: Tensor) -> Tensor:
    """Boolean tensor -> flat uint8 tensor, eight entries a byte, lowest bit first, where it is."""
    flat = mask.detach().to(torch.bool).flatten()
    if flat.device.type == "cpu":
        return torch.from_numpy(np.packbits(flat.numpy(), bitorder="little"))
    eights = F.pad(flat.view(torch.uint8), (0, -len(flat) % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=flat.device)
    return (eights << places).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """The boolean tensor of `shape` that `pack_bits` made these bytes from."""
    size = math.prod(shape)
    if bits.numel() != (size + 7) // 8:
        raise SympruneError(
            f"A packed mask of {bits.numel()} bytes does not hold {size} weights {tuple(shape)}."
        )
    flat = np.unpackbits(bits.cpu().numpy(), count=size, bitorder="little")
    return torch.from_numpy(flat).view(torch.bool).view(shape)


def find_pattern(keep: Tensor, candidates: tuple[str, ...] = ("2:4", "4:8", "1:4")) -> str | None:
    """The first N:M pattern every group of the mask obeys with equality, or None."""
    for text in candidates:
        pattern = Pattern.parse(text)
        if keep.shape[-1] % pattern.m == 0 and bool(
            (count_true(keep.reshape(-1, pattern.m)) == pattern.n).all()
        ):
            return text
    return None
