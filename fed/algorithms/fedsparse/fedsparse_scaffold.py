"""FedSparse with SCAFFOLD's control variates for the weights.

An Expectation-Maximization Perspective on Federated Learning, appendix E, which says no more than
that; written out here. The gates are those of FedSparse. Variates of pruned groups are not sent;
whatever they do to a dead weight is hidden behind its gate. With open gates and no penalties this
is `scaffold`, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from symprune.fed.algorithms.fedsparse.fedsparse import FedSparse
from symprune.fed.algorithms.fedsparse.gates import place_values
from symprune.fed.algorithms.fedsparse.scaffold import ScaffoldVariates
from symprune.fed.problems.losses import sigmoid
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Like, Message, Received, State, Turn
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class FedSparseScaffold(ScaffoldVariates, FedSparse):
    """FedSparse whose clients' weights do not drift; twice the weights per round."""

    name = "fedsparse-scaffold"
    paper = "Louizos et al.: An EM Perspective on Federated Learning, appendix E"
    sends = "as fedsparse; both ways a control variate for every weight not pruned"

    def broadcast(self, server: State, turn: Turn) -> Message:
        kept = self.kept_weights(server["alive"])
        return {**super().broadcast(server, turn), "c": server["c"][kept]}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        x, v, alive = self.unpack_broadcast(received)
        kept = self.kept_weights(alive)
        c = place_values(received["c"], kept)
        prior = sigmoid(self.logit(x, v))
        w, v = self._train(x, v, alive, problem, turn, correction=c - client["c"])
        sent = {"change": self.change(x, w, c, problem)[:, kept]}
        state, message = self.sample_reply(client, w, v, alive, prior, turn)
        moved = client["c"] + self.changes(received, sent)
        return {**state, "c": moved}, {**message, **sent}

    def changes(self, received: Received, replies: Received) -> Tensor:
        return place_values(replies["change"], self.kept_weights(received["alive"][0]))

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        changes = place_values(replies["change"], self.kept_weights(server["alive"]))
        c = self.update_variate(server, changes, turn)
        return {**super().server_step(server, replies, turn), "c": c}

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        change = Like(server["x"].dtype, (int(self.kept_weights(server["alive"]).sum()),))
        return {**super().reply_like(server, turn), "change": change}
