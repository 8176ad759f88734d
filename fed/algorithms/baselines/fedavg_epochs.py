"""FedAvg over epochs, and the same with a random part of every update sent (Subsampling).

Baselines of "Achieving Personalized Federated Learning with Sparse Local Models", section 6. They
train as FedSpa does, so with density 1 FedSpa and FedAvg here are the same to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from symprune.fed.algorithms.shared.local_epochs import LocalEpochs
from symprune.fed.compressors import parse
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Like, Message, Received, State, Turn, check
from symprune.fed.registry import register
from symprune.masks import keep_largest


@register
@dataclass(frozen=True)
class FedAvgEpochs(LocalEpochs):
    """FedAvg with epochs of minibatch SGD, clients weighted alike: x <- x - mean (x - w_i)."""

    name = "fedavg-epochs"
    paper = "McMahan et al.: Communication-efficient learning of deep networks, Algorithm 1"
    sends = "up: update, compressed if asked for; down: model"
    replies = ("update",)
    averages = True
    compressor: str = "identity"  # of the update

    def prepare(self, constants: Constants) -> Algorithm:
        parse(self.compressor).constants(constants.dimension)
        return super().prepare(constants)

    def reply(self, update: Tensor, turn: Turn) -> Message:
        if self.compressor == "identity":
            return {"update": update}
        return {"update": parse(self.compressor).sent(update, turn.stream("compress"))}

    def update(self, x: Tensor, problem: Problem, turn: Turn) -> Tensor:
        """`x - w_i` after local training from `x`."""
        return x - self.train_locally(problem, x, turn, turn.stream("batch"))

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        return client, self.reply(self.update(received["x"], problem, turn), turn)

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        return {"x": server["x"] - replies["update"].mean(0)}


@register
@dataclass(frozen=True)
class Subsampling(FedAvgEpochs):
    """FedAvg whose update is multiplied by a fresh random mask on its way up, not rescaled."""

    name = "subsampling"
    paper = "Konecny et al.: Federated learning, strategies for improving communication efficiency"
    sends = "up: round(r d) random values of the update; down: model"
    averages = False
    density: float = 0.5

    def prepare(self, constants: Constants) -> Algorithm:
        check(0 < self.density <= 1, f"subsampling: density {self.density} is outside (0, 1].")
        return super().prepare(constants)

    def mask(self, d: int, turn: Turn) -> Tensor:
        return keep_largest(turn.stream("mask").uniform(d), round(self.density * d))

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        mask = self.mask(problem.dimension, turn)
        update = self.update(received["x"], problem, turn)
        return client, self.reply(update[mask].view(len(mask), -1), turn)

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """Server and client make the mask from the same seed, so only values travel."""
        mask = self.mask(len(server["x"]), turn)
        update = server["x"].new_zeros(mask.shape).masked_scatter(mask, replies["update"])
        return {"x": server["x"] - update.mean(0)}

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        d = len(server["x"])
        return {"update": Like(server["x"].dtype, (round(self.density * d),))}
