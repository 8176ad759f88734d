"""RandProx-l1: ProxSkip for the federated lasso `min mean f_i(w) + l1 ||w||_1`.

"Prune at the clients, not the server", section 2.3. The paper gives no pseudo-code; this is its
Sparse-ProxSkip-Local with the proximal step of the l1 norm in place of TopK, and it reaches the
lasso solution. How sparse the model gets follows from `l1`; `sparsity` prunes what is evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.algorithms.proxskip.sparse_proxskip import FinalTopK
from symprune.fed.algorithms.shared.local_steps import soft_threshold
from symprune.fed.problems.problem import Constants
from symprune.fed.protocol import Algorithm, check, given
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class RandProxL1(FinalTopK):
    """RandProx with an l1 penalty: soft-thresholding after every local step (federated lasso)."""

    name = "randprox-l1"
    paper = "Prune at the clients, not the server, section 2.3 (RandProx-l1)"
    sends = "up: soft-thresholded model; down: mean model"
    sparsity: float = 0.0
    l1: float = 1e-3

    def prepare(self, constants: Constants) -> Algorithm:
        check(self.l1 >= 0, f"randprox-l1: l1 = {self.l1} must not be negative.")
        return super().prepare(constants)

    def after_step(self, what: Tensor) -> Tensor:
        """The proximal step of `gamma * l1 * ||.||_1`."""
        return soft_threshold(what, given(self.gamma) * self.l1)

    def upload_bits(self, what: Tensor) -> int | Tensor | None:
        """Non-zeros of what is sent; the mean has many more, tiny ones."""
        return 32 * torch.count_nonzero(what, dim=1)
