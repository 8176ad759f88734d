"""FedMixture: hard EM with a mixture of K Gaussians as the prior on the clients' models.

An Expectation-Maximization Perspective on Federated Learning, section 2 and appendix J. The server
trains an ensemble of K models, each the mean of the clients it is responsible for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.algorithms.fedsparse.em import EMMethod, remember
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Message, Received, State, Turn, check
from symprune.fed.registry import register

MOST_COMPONENTS = 100  # so that a client knows how large a broadcast may be


@register
@dataclass(frozen=True)
class FedMixture(EMMethod):
    """Prior of K Gaussians: the server trains K models, clients are drawn to the nearest."""

    name = "fedmixture"
    paper = "Louizos et al.: An EM Perspective on Federated Learning, appendix J (mixture prior)"
    sends = "up: local model; down: K models"
    replies = ("w",)
    pull: float = 0.1  # lambda, the precision of every Gaussian
    components: int = 2  # K
    spread: float = 0.01  # standard deviation by which the K models differ at first

    def prepare(self, constants: Constants) -> Algorithm:
        few = 1 <= self.components <= MOST_COMPONENTS
        check(few, f"components = {self.components} is not from 1 to {MOST_COMPONENTS}.")
        check(self.spread >= 0, f"spread = {self.spread} must not be negative.")
        return super().prepare(constants)

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        """The models start apart, or they would never separate, and none of them at x0, or every
        client would choose that one; a single model starts at x0."""
        noise = turn.shared("components").normal(self.components, len(x0))[0].to(x0.dtype)
        apart = self.spread if self.components > 1 else 0.0
        return {"models": x0 + apart * noise, "weights": torch.ones(self.components)}

    def most_received(self, dimension: int) -> int:
        return min(self.components, MOST_COMPONENTS) * dimension

    def broadcast(self, server: State, turn: Turn) -> Message:
        return {"models": server["models"]}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        """Epochs on `f_i(w) - log sum_k exp(-lambda/2 ||w - w_k||^2)` from the model that fits
        the client's rows best."""
        models, stream = received["models"], turn.stream("batch")
        losses = torch.stack([problem.value(models[:, k]) for k in range(self.components)], 1)
        w = models[torch.arange(len(models)), losses.argmin(1)]
        for _ in range(self.epochs):
            for rows, active in problem.epoch(stream, self.batch):
                g = problem.gradient(w, rows) + mixture_pull(w, models, self.pull)
                w = torch.where(active.unsqueeze(1), w - self.lr * g, w)
        return remember(client, w), {"w": w}

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """`w_k = sum_s r_sk w_s / sum_s r_sk`; a model nobody is responsible for stays."""
        w, models = replies["w"], server["models"]
        r = responsibilities(w, models.expand(len(w), -1, -1), self.pull)
        total = r.sum(0)
        means = (r.T @ w) / total.clamp_min(1e-12).unsqueeze(1)
        models = torch.where(total.unsqueeze(1) > 1e-12, means, models)
        return {"models": models, "weights": total.to(server["weights"].dtype)}

    def model(self, server: State) -> Tensor:
        """The component most clients were drawn to last."""
        return server["models"][int(server["weights"].argmax())]


def responsibilities(w: Tensor, models: Tensor, precision: float) -> Tensor:
    """`softmax_k(-lambda/2 ||w - w_k||^2)` for `w [C, d]`, `models [C, K, d]`."""
    score = -precision / 2 * (w.unsqueeze(1) - models).square().sum(2)
    share = torch.exp(score - score.max(1, keepdim=True).values)
    return share / share.sum(1, keepdim=True)


def mixture_pull(w: Tensor, models: Tensor, precision: float) -> Tensor:
    """Gradient of `-log sum_k exp(-lambda/2 ||w - w_k||^2)`."""
    r = responsibilities(w, models, precision).unsqueeze(2)
    return precision * (r * (w.unsqueeze(1) - models)).sum(1)
