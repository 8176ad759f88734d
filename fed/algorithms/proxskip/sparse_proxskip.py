"""Sparse-ProxSkip and the variants it is compared with.

"Prune at the clients, not the server": Algorithm 1 with TopK in different places, and appendix D.
TopK before the upload and before the control variate keeps `sum h_i = 0`; TopK at the server, or
measuring h against the unpruned vector, does not, and the method drifts. Every variant is evaluated
and returned after a final TopK.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from symprune.fed.algorithms.proxskip.proxskip import ProxSkip
from symprune.fed.compressors import top_k
from symprune.fed.protocol import State, kept
from symprune.fed.registry import register

PAPER = "Prune at the clients, not the server"


@register
@dataclass(frozen=True)
class FinalTopK(ProxSkip):
    """ProxSkip, dense throughout; TopK only on the final model."""

    name = "final-topk"
    paper = f"{PAPER}, section 4 (Final-TopK)"
    sparsity: float = 0.9

    def prune(self, w: Tensor) -> Tensor:
        """TopK over the whole flat vector, `K = round((1 - sparsity) d)`."""
        return top_k(w, kept(self.sparsity, w.shape[-1]))

    def model(self, server: State) -> Tensor:
        return self.prune(server["x"])


@register
@dataclass(frozen=True)
class SparseProxSkip(FinalTopK):
    """TopK at the client, once, just before the upload (the proposed method)."""

    name = "sparse-proxskip"
    paper = f"{PAPER}, Algorithm 1 (Sparse-ProxSkip)"
    sends = "up: K of d values; down: mean of K-sparse models"

    def before_upload(self, what: Tensor) -> Tensor:
        return self.prune(what)

    def upload_bits(self, what: Tensor) -> int | Tensor | None:
        return 32 * kept(self.sparsity, what.shape[-1])


@register
@dataclass(frozen=True)
class SparseProxSkipLocal(SparseProxSkip):
    """TopK at the client after every local step."""

    name = "sparse-proxskip-local"
    paper = f"{PAPER}, Algorithm 1 (Sparse-ProxSkip-Local)"

    def after_step(self, what: Tensor) -> Tensor:
        return self.prune(what)

    def before_upload(self, what: Tensor) -> Tensor:
        return what


@register
@dataclass(frozen=True)
class SparseProxSkipModified(SparseProxSkip):
    """Ablation: sends TopK but measures h against the unpruned vector, so sum h_i drifts. That
    vector never leaves the client: one that lost its disk goes on from what it sent."""

    name = "sparse-proxskip-modified"
    paper = f"{PAPER}, appendix D (Sparse-ProxSkip-modified)"

    def remembered(self, what: Tensor, sent: Tensor) -> Tensor:
        return what


@register
@dataclass(frozen=True)
class ServerPruning(FinalTopK):
    """TopK at the server after the mean; breaks sum h_i = 0."""

    name = "accelerated-server-pruning"
    paper = f"{PAPER}, section 3.3 (Accelerated-Server-Pruning)"
    sends = "up: local model, dense; down: K of d values"

    def after_mean(self, w: Tensor) -> Tensor:
        return self.prune(w)


@register
@dataclass(frozen=True)
class ServerPruningModified(FinalTopK):
    """TopK on the mean after the control variates: sum h_i = 0 holds, but both ways are dense."""

    name = "accelerated-server-pruning-modified"
    paper = f"{PAPER}, appendix D (Accelerated-Server-Pruning-modified)"

    def on_receipt(self, w: Tensor) -> Tensor:
        return self.prune(w)
