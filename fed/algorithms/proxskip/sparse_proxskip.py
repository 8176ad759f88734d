"""ProxSkip (Scaffnew), Sparse-ProxSkip and the methods it is compared with: one loop, in which TopK
stands in one place or another.

"Prune at the clients, not the server", Algorithm 1, section 2.3 and appendix D. Between two
communications a client makes a geometric number of steps
`w_hat_i <- w_hat_i - gamma (g_i(w_hat_i) - h_i)`; then `w = mean w_hat_i` and
`h_i <- h_i + (p/gamma)(w - w_hat_i)`. By theory gamma = 1/L_max and p = sqrt(gamma mu).

TopK before the upload and before the control variate keeps `sum h_i = 0`; TopK at the server, or
measuring h against the unpruned vector, does not, and the method drifts. Every pruned variant is
evaluated and returned after a final TopK.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from symprune.fed.algorithms.shared.control_variates import ControlVariates, control_variates
from symprune.fed.algorithms.shared.local_steps import LocalSteps, soft_threshold
from symprune.fed.algorithms.shared.rounding import round_values
from symprune.fed.compressors import parse_quantiser, top_k
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import (
    Algorithm,
    Message,
    Received,
    State,
    Turn,
    check,
    given,
    kept,
)
from symprune.fed.registry import register

PAPER = "Prune at the clients, not the server"


@register
@dataclass(frozen=True)
class ProxSkip(LocalSteps, ControlVariates):
    """Scaffnew: random communication, exact despite local steps, sqrt(kappa) rounds."""

    name = "proxskip"
    paper = f"{PAPER}, Algorithm 1 (ProxSkip/Scaffnew)"
    sends = "up: local model, dense; down: mean model"
    replies = ("what",)  # w_hat; the name is sent, and its bytes count
    follows_replies = True
    prunes: ClassVar[str | None] = None  # where: at "receipt", "step", "upload" or "server"
    measures_unpruned: ClassVar[bool] = False  # h_i against w_hat_i and not what was sent of it
    compressor: str = "identity"  # of the values that are sent: int8, int4, ...

    def prepare(self, constants: Constants) -> Algorithm:
        parse_quantiser(self.compressor)
        return super().prepare(constants)

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        w_hat = self.prune_at("receipt", received["x"])
        for gradient in self.gradients(problem, turn):
            step = given(self.gamma) * (gradient(w_hat) - client["h"])
            w_hat = self.prune_at("step", w_hat - step)
        pruned = self.prune_at("upload", w_hat)
        upload = round_values(self.compressor, pruned, self.upload_bits(pruned), turn)
        sent = upload.tensor  # h_i is measured against it, so rounding leaves sum h_i = 0
        assert isinstance(sent, Tensor)
        state = self.await_mean(client, w_hat if self.measures_unpruned else sent)
        return state, {"what": upload}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        w = self.prune_at("server", replies["what"].mean(0))
        return self.publish_mean(server, w, turn)

    def variate_rate(self, turn: Turn, like: Tensor) -> Tensor | float:
        return given(self.p) / given(self.gamma)

    def prune_at(self, place: str, w: Tensor) -> Tensor:
        return self.prune(w) if place == self.prunes else w

    def prune(self, w: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no prune.")

    def upload_bits(self, sent: Tensor) -> int | Tensor | None:
        return None

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        return self.await_mean(memory, replies["what"])

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """`||sum h_i|| / mean ||h_i||`, zero up to rounding when the method is sound."""
        h = control_variates(self, server, client)
        size = float(h.norm(dim=1).mean())
        return {"h_sum": float(h.sum(0).norm()) / size if size else 0.0}


@register
@dataclass(frozen=True)
class FinalTopK(ProxSkip):
    """ProxSkip, dense throughout; TopK only on the final model."""

    name = "final-topk"
    paper = f"{PAPER}, section 4 (Final-TopK)"
    sparsity: float = 0.9

    def top_k(self, w: Tensor) -> Tensor:
        """TopK over the whole flat vector, `K = round((1 - sparsity) d)`."""
        return top_k(w, kept(self.sparsity, w.shape[-1]))

    def prune(self, w: Tensor) -> Tensor:
        return self.top_k(w)

    def upload_bits(self, sent: Tensor) -> int | Tensor | None:
        pruned = self.prunes in ("step", "upload")
        return 32 * kept(self.sparsity, sent.shape[-1]) if pruned else None

    def model(self, server: State) -> Tensor:
        return self.top_k(server["x"])


@register
@dataclass(frozen=True)
class SparseProxSkip(FinalTopK):
    """TopK at the client, once, just before the upload (the proposed method)."""

    name = "sparse-proxskip"
    paper = f"{PAPER}, Algorithm 1 (Sparse-ProxSkip)"
    sends = "up: K of d values; down: mean of K-sparse models"
    prunes = "upload"


@register
@dataclass(frozen=True)
class SparseProxSkipLocal(SparseProxSkip):
    """TopK at the client after every local step."""

    name = "sparse-proxskip-local"
    paper = f"{PAPER}, Algorithm 1 (Sparse-ProxSkip-Local)"
    prunes = "step"


@register
@dataclass(frozen=True)
class SparseProxSkipModified(SparseProxSkip):
    """Ablation: sends TopK but measures h against the unpruned vector, so sum h_i drifts. That
    vector never leaves the client: one that lost its disk goes on from what it sent."""

    name = "sparse-proxskip-modified"
    paper = f"{PAPER}, appendix D (Sparse-ProxSkip-modified)"
    measures_unpruned = True
    follows_replies = False


@register
@dataclass(frozen=True)
class ServerPruning(FinalTopK):
    """TopK at the server after the mean; breaks sum h_i = 0."""

    name = "accelerated-server-pruning"
    paper = f"{PAPER}, section 3.3 (Accelerated-Server-Pruning)"
    sends = "up: local model, dense; down: K of d values"
    prunes = "server"


@register
@dataclass(frozen=True)
class ServerPruningModified(FinalTopK):
    """TopK on the mean after the control variates: sum h_i = 0 holds, but both ways are dense."""

    name = "accelerated-server-pruning-modified"
    paper = f"{PAPER}, appendix D (Accelerated-Server-Pruning-modified)"
    prunes = "receipt"


@register
@dataclass(frozen=True)
class RandProxL1(FinalTopK):
    """RandProx with an l1 penalty: soft-thresholding after every local step (federated lasso).

    `min mean f_i(w) + l1 ||w||_1`. The paper gives no pseudo-code; this is Sparse-ProxSkip-Local
    with the proximal step of the l1 norm in place of TopK, and it reaches the lasso solution. How
    sparse the model gets follows from `l1`; `sparsity` prunes what is evaluated."""

    name = "randprox-l1"
    paper = f"{PAPER}, section 2.3 (RandProx-l1)"
    sends = "up: soft-thresholded model; down: mean model"
    prunes = "step"
    sparsity: float = 0.0
    l1: float = 1e-3

    def prepare(self, constants: Constants) -> Algorithm:
        check(self.l1 >= 0, f"randprox-l1: l1 = {self.l1} must not be negative.")
        return super().prepare(constants)

    def prune(self, w: Tensor) -> Tensor:
        """The proximal step of `gamma * l1 * ||.||_1`."""
        return soft_threshold(w, given(self.gamma) * self.l1)

    def upload_bits(self, sent: Tensor) -> int | Tensor | None:
        """Non-zeros of what is sent; the mean has many more, tiny ones."""
        return 32 * torch.count_nonzero(sent, dim=1)
