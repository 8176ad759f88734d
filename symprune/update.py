"""Mask + statistics -> re-fitted kept weights: masked least squares, and SparseGPT as a baseline.

Both minimise ||X(W~ - W)||_F over the kept weights with G = X^T X; the pruned ones stay zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.masks import Pattern, keep_by_layer, keep_n_of_m

ROWS_AT_ONCE = 512


def least_squares(
    weight: Tensor,
    keep: Tensor,
    gram: Tensor,
    *,
    start: Tensor | None = None,
    iters: int = 20,
    damping: float = 0.01,
    shrink: float = 0.0,
    tolerance: float = 1e-3,
) -> Tensor:
    """Kept weights re-fitted to the dense layer's outputs, by preconditioned conjugate gradients.

    Minimises sum over rows of (w~ - w)^T (G + R) (w~ - w), with R from `ridge`: directions the
    calibration data does not show stay at the dense weights. start is where the kept weights begin,
    the dense ones if not given. An iteration is one product with G. Stops after `iters`, or when
    every row's residual is below `tolerance` times that of the masked dense weights.
    """
    weight = weight.float()
    gram = gram.to(weight.device)
    added = ridge(gram, damping, shrink)
    begin = weight if start is None else start
    if not added.any():
        return begin * keep
    parts = zip(*(t.split(ROWS_AT_ONCE) for t in (weight, begin, keep)), strict=True)
    return torch.cat([_fit(w, x * k, k, gram, added, iters, tolerance) for w, x, k in parts])


def ridge(gram: Tensor, damping: float, shrink: float) -> Tensor:
    """The diagonal that is added to G: `damping` times the mean of G's, so that nothing is
    singular, and `shrink` times G's own, as channels are less correlated than few tokens say."""
    diagonal = gram.diagonal()
    return damping * diagonal.mean() + shrink * diagonal


def _fit(
    weight: Tensor,
    fitted: Tensor,
    keep: Tensor,
    gram: Tensor,
    added: Tensor,
    iters: int,
    tolerance: float,
) -> Tensor:
    """Conjugate gradients from `fitted` for some rows, all at once."""
    kept = keep.to(weight.dtype)
    scale = 1 / (gram.diagonal() + added)

    def apply(v: Tensor) -> Tensor:
        return torch.addmm(v * added, v, gram).mul_(kept)

    def size_of(residual: Tensor) -> Tensor:
        return (residual * residual).mul_(scale).sum(1, keepdim=True)

    residual = apply(weight - fitted)
    enough = tolerance**2 * size_of(apply(weight * ~keep) if iters else residual)
    step, size = residual * scale, size_of(residual)
    for _ in range(iters):
        going = size > enough
        if not going.any():
            break
        image = apply(step)
        curvature = (step * image).sum(1, keepdim=True)
        rate = torch.where(going & (curvature > 0), size / curvature, torch.zeros_like(size))
        fitted.addcmul_(rate, step)
        residual.addcmul_(rate, image, value=-1)
        new_size = size_of(residual)
        turn = torch.where(going, new_size / size, torch.zeros_like(size))
        step.mul_(turn).addcmul_(residual, scale)
        size = torch.where(going, new_size, size)
    return fitted


def sparsegpt(
    weight: Tensor,
    keep: Tensor | None,
    gram: Tensor,
    *,
    sparsity: float = 0.5,
    pattern: Pattern | None = None,
    damping: float = 0.01,
    block: int = 128,
) -> tuple[Tensor, Tensor]:
    """SparseGPT (Frantar and Alistarh, 2023): column by column, each removed weight's error is
    spread over the columns to its right through the inverse Hessian. Returns the weights and the
    mask.

    keep=None selects as the paper does: in blocks of `block` columns by w^2 / [H^-1]_jj^2, N:M
    inside every group. With a mask only the weights are updated.
    """
    weight = weight.float().clone()
    gram = gram.to(weight.device).clone()
    columns = weight.shape[1]
    dead = gram.diagonal() == 0
    gram[dead, dead] = 1
    weight[:, dead] = 0
    gram.diagonal().add_(damping * gram.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(gram)
    if int(failed):
        raise SympruneError("SparseGPT's Hessian is not positive definite; raise its damping.")
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
    chosen = torch.ones_like(weight, dtype=torch.bool) if keep is None else keep.clone()
    for start in range(0, columns, block):
        end = min(start + block, columns)
        local, upper = weight[:, start:end].clone(), inverse[start:end, start:end]
        if keep is None and pattern is None:
            saliency = local**2 / upper.diagonal() ** 2
            chosen[:, start:end] = keep_by_layer(saliency, sparsity)
        errors = torch.zeros_like(local)
        for j in range(end - start):
            if keep is None and pattern is not None and (start + j) % pattern.m == 0:
                group = slice(j, j + pattern.m)
                saliency = local[:, group] ** 2 / upper.diagonal()[group] ** 2
                chosen[:, start + j : start + j + pattern.m] = keep_n_of_m(saliency, pattern)
            kept = local[:, j] * chosen[:, start + j]
            errors[:, j] = (local[:, j] - kept) / upper[j, j]
            local[:, j:] -= errors[:, j : j + 1] * upper[j, j:]
            local[:, j] = kept
        weight[:, start:end] = local
        weight[:, end:] -= errors @ inverse[start:end, end:]
    return weight * chosen, chosen
