"""The step sizes of EF-BV (thesis chapter 2, Theorems 2.4.1 and 2.4.2, appendix A)."""

from __future__ import annotations

import math


def remainder(scaling: float, eta: float, omega: float) -> float:
    """`r = (1 - lam + lam eta)^2 + lam^2 omega`: how much of the error is left after one step."""
    return (1 - scaling + scaling * eta) ** 2 + scaling**2 * omega


def largest_step(L: float, L_tilde: float, r: float, r_av: float, nonconvex: bool) -> float:
    """`1 / (L + L_tilde sqrt(r_av/r) / s)` with `s* = sqrt((1+r)/(2r)) - 1`, or for nonconvex f
    `s = 1/sqrt(r) - 1`; written so that r = 0 needs no special case."""
    gap = (1 if nonconvex else math.sqrt((1 + r) / 2)) - math.sqrt(r)
    return 1 / (L + L_tilde * math.sqrt(r_av) / gap)
