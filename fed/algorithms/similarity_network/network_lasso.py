"""The proximal step of the network lasso `lam sum_{(i,j)} ||z_i - z_j||_p` by ADMM.

Communication Efficient Training of Federated Model Over Unbalanced Labels, Algorithm 4, with rows
for its columns. The source's shrinkage `(1 - kappa/||v||_q)_+ v` is the proximal operator for p = 2
only; for p = 1 and infinity the right one is used here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from symprune.fed.algorithms.similarity_network.graph import incidence
from symprune.fed.protocol import check

NORMS = (1.0, 2.0, float("inf"))


def edge_prox(v: Tensor, kappa: float, p: float) -> Tensor:
    """`argmin_w kappa ||w||_p + 1/2 ||w - v||^2` for every row of `v [E, d]`."""
    check(p in NORMS, f"The fusion norm p = {p} must be 1, 2 or inf.")
    if kappa == 0:
        return v
    if p == 1:
        return v.sign() * (v.abs() - kappa).clamp_min(0)
    if p == 2:
        return v * (1 - kappa / v.norm(dim=1, keepdim=True).clamp_min(1e-300)).clamp_min(0)
    return v - onto_l1_ball(v, kappa)


def onto_l1_ball(v: Tensor, radius: float) -> Tensor:
    """The nearest point of every row with `||.||_1 <= radius`, by sorting."""
    size = v.abs().sort(dim=1, descending=True).values
    count = torch.arange(1, v.shape[1] + 1, dtype=v.dtype)
    excess = (size.cumsum(1) - radius) / count
    last = (size > excess).sum(1, keepdim=True).clamp_min(1) - 1
    threshold = excess.gather(1, last).clamp_min(0)
    return v.sign() * (v.abs() - threshold).clamp_min(0)


def fusion(z: Tensor, edges: Tensor, p: float) -> Tensor:
    """`sum over edges of ||z_i - z_j||_p`."""
    return torch.linalg.vector_norm(z[edges[:, 0]] - z[edges[:, 1]], ord=p, dim=1).sum()


def network_lasso_prox(
    target: Tensor,
    edges: Tensor,
    split: Tensor,
    multiplier: Tensor,
    *,
    lam: float,
    eta: float,
    p: float = 2.0,
    rho: float | None = None,
    steps: int = 50,
    tolerance: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """`argmin_Z lam sum_e ||(Z^T Q)_e||_p + ||Z - target||^2 / (2 eta)` with rows `Z [N, d]`.

    `split` and `multiplier [E, d]` are ADMM's other variables, kept from call to call: an edge is
    fused where `split` is exactly zero. Stops when both residuals are below `tolerance` times the
    size of Z. Works in float64."""
    if lam == 0 or len(edges) == 0 or target.shape[1] == 0:
        return target, _differences(target, edges), torch.zeros_like(multiplier)
    rho = 1 / eta if rho is None else rho
    goal, w, omega = target.double(), split.double(), multiplier.double()
    Q = incidence(edges, len(target))
    eye = torch.eye(len(target), dtype=torch.float64)
    factor = torch.linalg.cholesky(eye + eta * rho * Q @ Q.T)
    limit = tolerance * max(1.0, float(goal.norm()))
    z = goal
    for _ in range(steps):
        right = goal + eta * (Q @ (omega + rho * w))
        z = torch.cholesky_solve(right, factor)
        difference, before = _differences(z, edges), w
        w = edge_prox(difference - omega / rho, lam / rho, p)
        omega = omega + rho * (w - difference)
        primal = float((w - difference).norm())
        if primal <= limit and rho * float((Q @ (w - before)).norm()) <= limit:
            break
    return z.to(target.dtype), w.to(split.dtype), omega.to(multiplier.dtype)


def _differences(z: Tensor, edges: Tensor) -> Tensor:
    return z[edges[:, 0]] - z[edges[:, 1]]
