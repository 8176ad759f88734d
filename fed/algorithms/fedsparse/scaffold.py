"""SCAFFOLD: epochs of SGD whose drift to a client's own optimum is corrected.

Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", as the EM
paper on FedSparse compares with it (appendix E): the server takes the clients' differences as a
gradient. With a plain server step it is the original.
"""

from __future__ import annotations

from dataclasses import dataclass

from symprune.fed.algorithms.fedsparse.em import remember
from symprune.fed.algorithms.fedsparse.fedopt import FedOpt
from symprune.fed.algorithms.fedsparse.scaffold_variates import ScaffoldVariates
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Message, Received, State, Turn
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class Scaffold(ScaffoldVariates, FedOpt):
    """FedAvg with control variates: local steps along `g - c_s + c`."""

    name = "scaffold"
    paper = "Karimireddy et al.: SCAFFOLD; An EM Perspective on Federated Learning, appendix E"
    sends = "up: local model, change of its control variate; down: model, mean control variate"
    replies = ("w", "change")

    def broadcast(self, server: State, turn: Turn) -> Message:
        return {"x": server["x"], "c": server["c"]}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        x, c = received["x"], received["c"]
        w = self.trained(x, problem, turn, correction=c - client["c"])
        change = self.change(x, w, c, problem)
        return {**remember(client, w), "c": client["c"] + change}, {"w": w, "change": change}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        c = self.moved(server, replies["change"], turn)
        return {**super().server_step(server, replies, turn), "c": c}
