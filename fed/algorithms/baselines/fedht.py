"""FedHT and FedIHT: FedAvg with TopK at the server, or at the clients after every step.

Tong et al., as "Prune at the clients, not the server" (section 4 and appendix A) compares with
them: sparse training without control variates.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from symprune.fed.algorithms.baselines.fedavg import FedAvg
from symprune.fed.algorithms.shared.rounding import round_values
from symprune.fed.compressors import parse_quantiser, top_k
from symprune.fed.problems.problem import Constants
from symprune.fed.protocol import Algorithm, Message, State, Turn, kept
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class FedHT(FedAvg):
    """FedAvg with TopK at the server after the mean."""

    name = "fedht"
    paper = "Tong et al.: Federated nonconvex sparse learning (FedHT)"
    sends = "up: local model, dense; down: K of d values"
    sparsity: float = 0.9

    def prune(self, w: Tensor) -> Tensor:
        return top_k(w, kept(self.sparsity, w.shape[-1]))

    def after_mean(self, w: Tensor) -> Tensor:
        return self.prune(w)

    def model(self, server: State) -> Tensor:
        return self.prune(server["x"])


@register
@dataclass(frozen=True)
class FedIHT(FedHT):
    """TopK at the client after every local step; `server_topk` also at the server, as in Tong et
    al. Without it the mean has the union of the supports, which is what the paper compares with."""

    name = "fediht"
    paper = "Tong et al.: Federated nonconvex sparse learning (FedIHT)"
    sends = "up: K of d values; down: mean of K-sparse models"
    server_topk: bool = False

    def after_step(self, w: Tensor) -> Tensor:
        return self.prune(w)

    def after_mean(self, w: Tensor) -> Tensor:
        return self.prune(w) if self.server_topk else w

    def prepare(self, constants: Constants) -> Algorithm:
        parse_quantiser(self.compressor)
        return super().prepare(constants)

    @property
    def sends_update(self) -> bool:
        """What is sent is sparse, its difference to the last model is not."""
        return False

    def reply(self, w: Tensor, x: Tensor, turn: Turn) -> Message:
        bits = 32 * kept(self.sparsity, w.shape[-1])
        return {"w": round_values(self.compressor, w, bits, turn)}
