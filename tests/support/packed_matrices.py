"""Random matrices of every kind, packed, with what they should decode to."""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.runtime.blob import Codes, encode_codes, encode_floats
from symprune.runtime.layout import BITS, FLOATS

FLOAT_KINDS = tuple(FLOATS)
CODE_KINDS = tuple(kind for kind in BITS if kind not in FLOATS)
SHAPES = [(1, 1), (1, 64), (3, 130), (8, 64), (9, 63), (16, 128), (17, 200), (40, 1)]


def random_codes(
    rows: int, columns: int, kind: str, sparsity: float | None, generator: torch.Generator
) -> Codes:
    """Codes over all levels, scales of very different sizes and, where a level is zero, of
    either sign, and a mask unless sparsity is None."""
    low = 1 if kind == "int8" else 0
    codes = torch.randint(
        low, 2 ** BITS[kind], (rows, columns), generator=generator, dtype=torch.uint8
    )
    groups = -(-columns // 64)
    scales = torch.exp(torch.randn(rows, groups, generator=generator)).bfloat16() / 64
    if kind.endswith("z"):
        scales[torch.rand(rows, groups, generator=generator) < 0.5] *= -1
    keep = None
    if sparsity is not None:
        keep = torch.rand(rows, columns, generator=generator) >= sparsity
    return codes, scales, keep


def dense_of(codes: Codes, kind: str) -> Tensor:
    """scale * level, in float32, as the format's own definition has it."""
    values, scales, keep = codes
    whole = values.float()
    levels = whole - 2 ** (BITS[kind] - 1)
    if kind in ("int4", "int3", "int2"):
        levels[levels >= 0] += 1
    weights = levels * scales.float().repeat_interleave(64, 1)[:, : values.shape[1]]
    return weights if keep is None else torch.where(keep, weights, torch.zeros(()))


def random_matrix(
    rows: int, columns: int, kind: str, sparsity: float | None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(a blob, the float32 matrix it holds)."""
    generator = torch.Generator().manual_seed(seed)
    if kind in FLOATS:
        weight = torch.randn(rows, columns, generator=generator)
        if sparsity is not None:
            weight[torch.rand(rows, columns, generator=generator) < sparsity] = 0
        weight = weight.to(FLOATS[kind])
        return encode_floats([weight]), weight.float()
    codes = random_codes(rows, columns, kind, sparsity, generator)
    return encode_codes([codes], kind), dense_of(codes, kind)
