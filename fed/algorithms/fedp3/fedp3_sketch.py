"""FedP3 in its theoretical form (thesis Algorithm 10, appendix C).

A client takes one gradient step on a randomly pruned model and sends only the d/n coordinates that
the step's permutation gives it, which the server copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.algorithms.fedp3.permutation_upload import PermutationUpload
from symprune.fed.algorithms.shared.layer_masks import spread
from symprune.fed.algorithms.shared.local_steps import step_size
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Message, Received, Sent, State, Turn, check, given
from symprune.fed.registry import register
from symprune.masks import keep_largest


@register
@dataclass(frozen=True)
class FedP3Sketch(PermutationUpload):
    """One gradient step on a randomly pruned model; every coordinate is sent by one client."""

    name = "fedp3-sketch"
    paper = "FedP3 (thesis chapter 4), Algorithm 10, Theorem 4.3.3"
    sends = "up: d/n coordinates each; down: model, pruned at random to a share `keep`"
    keep: float = 1.0

    def prepare(self, constants: Constants) -> Algorithm:
        """gamma = min{1/L_max, 1/sqrt(mean(L) L_max K)} (Theorem 4.3.3)."""
        check(0 < self.keep <= 1, f"{self.name}: keep = {self.keep} is outside (0, 1].")
        check(self.iterations > 0, f"{self.name}: iterations must be positive.")
        gamma = step_size(self.gamma, constants, self.name)
        if self.gamma is None:
            mean = sum(constants.L) / constants.clients
            gamma = min(gamma, 1 / math.sqrt(mean * constants.L_max * self.iterations))
        return replace(self, gamma=gamma)

    def pruning(self, d: int, turn: Turn) -> Tensor:
        """P_i: a random `round(keep d)` of the coordinates, not rescaled."""
        if self.keep == 1:
            return torch.ones(len(turn.clients), d, dtype=torch.bool)
        return keep_largest(turn.stream("prune").uniform(d), round(self.keep * d))

    def broadcast(self, server: State, turn: Turn) -> Message:
        mask = self.pruning(len(server["x"]), turn)
        rows = server["x"].expand(len(mask), -1)
        return {"values": Sent(rows[mask].view(len(mask), -1), each=True)}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        mask = self.pruning(problem.dimension, turn)
        w = spread(mask, received["values"])
        return client, self.reply(w - given(self.gamma) * problem.gradient(w) * mask, turn)
