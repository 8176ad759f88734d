"""Gradients made of few distinct values: total-variation denoising, 1-D k-means, and their code.

Communication Efficient Training of Federated Model Over Unbalanced Labels, section V. Its Eq. 7 is
`min_u 1/2 ||u - g||^2 + gamma (sum |u_i - u_{i+1}| + |u_d|)`: neither the current point nor the
step matters. Biased: without error feedback, or gamma -> 0, it leaves a floor.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log2

import numpy as np
import torch
from torch import Tensor

FORMATS = ("runs", "codebook", "raw")
Point = tuple[int, float]


def compress_gradient(g: Tensor, denoise: float, values: int) -> tuple[Tensor, Tensor]:
    """Every row of `g [C, d]` through the fused lasso at `denoise * mean |g|` and, unless `values`
    is 0, through k-means on its entries; and the bits of its code."""
    rows = []
    for row in g.cpu().numpy():
        u = fused_lasso(row, denoise * float(np.abs(row).mean())).astype(row.dtype)
        rows.append(quantise(u, values) if values else u)
    bits = torch.tensor([code_bits(u) for u in rows])
    return torch.from_numpy(np.stack(rows)).to(g), bits


def fused_lasso(g: np.ndarray, gamma: float) -> np.ndarray:
    """The exact minimiser, float64. Mirroring g to `[g, -reversed g]` turns the last term into an
    ordinary difference, so it is the first half of plain total-variation denoising."""
    g = np.asarray(g, np.float64)
    if gamma <= 0 or len(g) == 0:
        return g.copy()
    return _taut_string(np.concatenate([g, -g[::-1]]), gamma)[: len(g)]


def _taut_string(y: np.ndarray, gamma: float) -> np.ndarray:
    """Slopes of the shortest path through the tube of half-width gamma around the running sums,
    fixed at both ends. `upper` and `lower` are the shortest paths from the last knot to the tube's
    two walls (a funnel); where they cross, the string is pinned and the knot moves on."""
    sums = np.concatenate([[0.0], np.cumsum(y)])
    n, knots = len(y), [(0, 0.0)]
    upper: list[Point] = [knots[0]]
    lower: list[Point] = [knots[0]]
    for k in range(1, n + 1):
        half = 0.0 if k == n else gamma
        _extend(upper, (k, float(sums[k]) + half), convex=True)
        while len(upper) == 2 and len(lower) > 1 and _slope(*upper) <= _slope(*lower[:2]):
            lower.pop(0)
            knots.append(lower[0])
            upper[:] = [lower[0], (k, float(sums[k]) + half)]
        _extend(lower, (k, float(sums[k]) - half), convex=False)
        while len(lower) == 2 and len(upper) > 1 and _slope(*lower) >= _slope(*upper[:2]):
            upper.pop(0)
            knots.append(upper[0])
            lower[:] = [upper[0], (k, float(sums[k]) - half)]
    knots += [point for point in lower[1:] if point[0] > knots[-1][0]]
    out = np.empty(n)
    for a, b in pairwise(knots):
        out[a[0] : b[0]] = _slope(a, b)
    return out


def _extend(chain: list[Point], point: Point, convex: bool) -> None:
    """Add a point and drop those that no longer bend the chain the right way."""
    while len(chain) > 1:
        before, after = _slope(chain[-2], chain[-1]), _slope(chain[-1], point)
        if (before < after) if convex else (before > after):
            break
        chain.pop()
    chain.append(point)


def _slope(a: Point, b: Point) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def quantise(u: np.ndarray, k: int, iterations: int = 20) -> np.ndarray:
    """Every entry replaced by the mean of its cluster: 1-D k-means from quantiles."""
    values = np.sort(u)
    distinct = values[np.concatenate([[True], values[1:] != values[:-1]])]
    if k >= len(distinct):
        return u.copy()
    centres = values[((np.arange(k) + 0.5) / k * len(values)).astype(int)].astype(np.float64)
    centres = centres[np.concatenate([[True], centres[1:] != centres[:-1]])]
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    for _ in range(iterations):
        cut = np.searchsorted(values, (centres[1:] + centres[:-1]) / 2)
        edge = np.concatenate([[0], cut, [len(values)]])
        full = np.diff(edge) > 0
        edge = np.concatenate([[0], edge[1:][full]])
        moved = np.diff(sums[edge]) / np.diff(edge)
        if len(moved) == len(centres) and np.array_equal(moved, centres):
            break
        centres = moved
    return centres[np.searchsorted((centres[1:] + centres[:-1]) / 2, u)].astype(u.dtype)


def gamma_bits(n: int) -> int:
    """Length of n >= 1 in Elias' gamma code."""
    return 2 * (n.bit_length() - 1) + 1


def code_bits(u: np.ndarray) -> int:
    """Length of the code of u as float32: two bits for the format, then the shortest of three."""
    return 2 + min(_lengths(np.asarray(u, np.float32)).values())


def encode(u: np.ndarray) -> str:
    """The code itself, as a string of 0 and 1."""
    u = np.asarray(u, np.float32)
    lengths = _lengths(u)
    form = min(FORMATS, key=lambda name: lengths[name])
    out = [format(FORMATS.index(form), "02b")]
    bits = u.view(np.uint32)
    if form == "raw":
        out += [format(int(b), "032b") for b in bits]
    elif form == "runs":
        starts = _starts(bits)
        ends = [*starts[1:].tolist(), len(u)]
        out.append(_gamma(len(starts)))
        for start, end in zip(starts.tolist(), ends, strict=True):
            out += [format(int(bits[start]), "032b"), _gamma(end - start)]
    else:
        table, codes = np.unique(bits, return_inverse=True)
        width = ceil(log2(len(table)))
        out.append(_gamma(len(table)))
        out += [format(int(b), "032b") for b in table]
        out += [format(int(c), f"0{width}b") for c in codes] if width else []
    return "".join(out)


def decode(code: str, d: int) -> np.ndarray:
    """The d values of a code, bit for bit."""
    form, at = FORMATS[int(code[:2], 2)], 2
    if form == "raw":
        words = [int(code[at + 32 * i : at + 32 * i + 32], 2) for i in range(d)]
        return np.array(words, np.uint32).view(np.float32)
    count, at = _read_gamma(code, at)
    words = []
    if form == "runs":
        for _ in range(count):
            word, at = int(code[at : at + 32], 2), at + 32
            length, at = _read_gamma(code, at)
            words += [word] * length
        return np.array(words, np.uint32).view(np.float32)
    table = [int(code[at + 32 * i : at + 32 * i + 32], 2) for i in range(count)]
    at, width = at + 32 * count, ceil(log2(count))
    codes = [int(code[at + width * i : at + width * (i + 1)] or "0", 2) for i in range(d)]
    return np.array([table[c] for c in codes], np.uint32).view(np.float32)


def _lengths(u: np.ndarray) -> dict[str, int]:
    bits = u.view(np.uint32)
    starts = _starts(bits)
    lengths = np.diff(np.concatenate([starts, [len(u)]]))
    runs = gamma_bits(len(starts)) + sum(32 + gamma_bits(int(n)) for n in lengths)
    k = len(np.unique(bits))
    book = gamma_bits(k) + 32 * k + len(u) * ceil(log2(k))
    return {"runs": runs, "codebook": book, "raw": 32 * len(u)}


def _starts(bits: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.flatnonzero(np.diff(bits.astype(np.int64))) + 1])


def _gamma(n: int) -> str:
    return "0" * (n.bit_length() - 1) + format(n, "b")


def _read_gamma(code: str, at: int) -> tuple[int, int]:
    zeros = code.index("1", at) - at
    return int(code[at + zeros : at + 2 * zeros + 1], 2), at + 2 * zeros + 1
