"""EF21 and DIANA as EF-BV with their own scalings and step sizes (thesis chapter 2, section 2.3).

EF21 has nu = lam, so its gradient estimate is the mean of the control variates. DIANA has nu = 1,
so the estimate is unbiased when the compressor is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from symprune.fed.algorithms.ef_bv.ef_bv import EFBV
from symprune.fed.compressors import Constants as Noise
from symprune.fed.problems.problem import Constants
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class EF21(EFBV):
    """EF-BV with nu = lam; its step size knows nothing of averaging over workers (r_av = r)."""

    name = "ef21"
    paper = "EF21, as in EF-BV (thesis chapter 2), section 2.3 and Table A.2"

    def scalings(self, noise: Noise, omega_av: float) -> tuple[float, float]:
        lam = noise.best_scaling if self.lam is None else self.lam
        return lam, lam if self.nu is None else self.nu

    def step(self, constants: Constants, noise: Noise, omega_av: float) -> float:
        return super().step(constants, noise, noise.omega)


@register
@dataclass(frozen=True)
class DIANA(EFBV):
    """EF-BV with nu = 1 and unbiased compression, with DIANA's own, larger step size."""

    name = "diana"
    paper = "DIANA, as in EF-BV (thesis chapter 2), section 2.3 and appendix A"
    compressor: str = "rand-k:0.1"

    def scalings(self, noise: Noise, omega_av: float) -> tuple[float, float]:
        lam = 1 / (1 + noise.omega) if self.lam is None else self.lam
        return lam, 1.0 if self.nu is None else self.nu

    def step(self, constants: Constants, noise: Noise, omega_av: float) -> float:
        """`1 / (L_max (1 + (1+sqrt 2)^2 omega_av))`; the theorem is for unbiased compressors, a
        biased one falls back to EF-BV's step. (The text prints omega_max; the proof has
        omega_av.)"""
        if noise.eta > 0 or self.l1 or self.nonconvex:
            return super().step(constants, noise, omega_av)
        return 1 / (constants.L_max * (1 + (1 + math.sqrt(2)) ** 2 * omega_av))
