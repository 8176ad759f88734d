"""FedAvg and its relatives without control variates: FedProx, FedHT, FedIHT.

"Prune at the clients, not the server", section 4 and appendix A for FedHT and FedIHT. The number of
local steps follows the same coin as ProxSkip's, so methods compare step for step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from symprune.fed.compressors import top_k
from symprune.fed.local import local_gradient, local_steps, probability, step_size
from symprune.fed.problem import Constants, Problem
from symprune.fed.protocol import (
    Algorithm,
    Message,
    Received,
    Sent,
    State,
    Turn,
    check,
    given,
    kept,
    register,
    sample,
)


@register
@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Local gradient steps from the common model, then the mean of the local models."""

    name = "fedavg"
    paper = "McMahan et al.: Communication-efficient learning of deep networks"
    sends = "up: local model; down: mean model"
    replies = ("w",)
    gamma: float | None = None
    p: float | None = 0.1
    batch: int | None = None
    clip: float | None = None
    cohort_size: int | None = None
    random_steps: bool = True

    def prepare(self, constants: Constants) -> Algorithm:
        """gamma = 1/L_max; 1/p local steps a round on average."""
        gamma = step_size(self.gamma, constants, self.name)
        return replace(self, gamma=gamma, p=probability(self.p, gamma, constants, self.name))

    def after_step(self, w: Tensor) -> Tensor:
        return w

    def after_mean(self, w: Tensor) -> Tensor:
        return w

    def pull(self, w: Tensor, x: Tensor) -> Tensor | float:
        return 0.0

    def upload_bits(self, d: int) -> int | None:
        return None

    def cohort(self, server: State, turn: Turn) -> Tensor:
        return sample(self.cohort_size, turn)

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        x, stream = received["x"], turn.stream("batch")
        w = x
        for _ in range(local_steps(given(self.p), turn, self.random_steps)):
            g = local_gradient(problem, w, self.batch, stream, self.clip)
            w = self.after_step(w - given(self.gamma) * (g + self.pull(w, x)))
        return client, {"w": Sent(w, self.upload_bits(problem.dimension))}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        return {"x": self.after_mean(replies["w"].mean(0))}


@register
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients minimise f_i(w) + mu_prox/2 ||w - x||^2."""

    name = "fedprox"
    paper = "Li et al.: Federated optimization in heterogeneous networks"
    mu_prox: float = 0.1

    def prepare(self, constants: Constants) -> Algorithm:
        """gamma = 1/(L_max + mu_prox): the proximal term adds to the smoothness."""
        check(self.mu_prox >= 0, f"fedprox: mu_prox = {self.mu_prox} must not be negative.")
        if self.gamma is None and constants.known:
            gamma = 1 / (constants.L_max + self.mu_prox)
            return replace(self, gamma=gamma).prepare(constants)
        return super().prepare(constants)

    def pull(self, w: Tensor, x: Tensor) -> Tensor | float:
        return self.mu_prox * (w - x)


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

    def upload_bits(self, d: int) -> int | None:
        return 32 * kept(self.sparsity, d)
