"""FedL1: group lasso at the clients and hard thresholds before every transfer.

An Expectation-Maximization Perspective on Federated Learning, appendix A, Eqs. 24 and 25: the
sparse baseline of FedSparse. Groups of norm at most lambda are set to zero, others keep their size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from symprune.fed.algorithms.fedsparse.em import GroupedWeights
from symprune.fed.algorithms.fedsparse.fedopt import FedOpt
from symprune.fed.problems.problem import Constants
from symprune.fed.protocol import Algorithm, Message, Sent, State, Turn, check
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class FedL1(FedOpt, GroupedWeights):
    """Local group lasso; groups of small norm are not sent, in either direction."""

    name = "fedl1"
    paper = "Louizos et al.: An EM Perspective on Federated Learning, appendix A (FedL1)"
    sends = "up and down: weights of the groups above the threshold"
    l1: float = 2e-3  # lambda: weight of the penalty, and the threshold

    def prepare(self, constants: Constants) -> Algorithm:
        check(self.l1 >= 0, f"fedl1: l1 = {self.l1} must not be negative.")
        return super().prepare(constants)

    def threshold(self, w: Tensor) -> Tensor:
        return w * self.groups.spread((self.groups.norm(w) > self.l1).to(w.dtype))

    def penalty(self, w: Tensor) -> Tensor | float:
        """`lambda w_g / ||w_g||`, zero at zero."""
        norm = self.groups.norm(w).clamp_min(1e-12)
        return self.l1 * w * self.groups.spread(1 / norm, exempt=0.0)

    def compress_reply(self, w: Tensor) -> Tensor | Sent:
        """With the paper's count: 32 bits a kept weight, one bit a group."""
        w = self.threshold(w)
        kept = self.groups.spread(self.groups.norm(w) > 0).bool().sum(1)
        return Sent(w, 32 * kept + self.groups.count)

    def broadcast(self, server: State, turn: Turn) -> Message:
        counted = self.compress_reply(server["x"].unsqueeze(0))
        assert isinstance(counted, Sent) and isinstance(counted.bits, Tensor)
        return {"x": Sent(counted.tensor[0], int(counted.bits[0]))}

    def model(self, server: State) -> Tensor:
        return self.threshold(server["x"].unsqueeze(0))[0]

    def metrics(self, server: State, client: State) -> dict[str, float]:
        kept = self.groups.norm(server["x"].unsqueeze(0)) > self.l1
        weights = self.groups.spread(kept)
        return {
            "sparsity": 1 - float(weights.double().mean()),
            "groups_pruned": 1 - float(kept.double().mean()),
        }
