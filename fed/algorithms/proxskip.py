"""ProxSkip, in federated learning Scaffnew: local steps with control variates that sum to zero.

"Prune at the clients, not the server", Algorithm 1 (the variants that prune are in
`sparse_proxskip.py`). Between two communications a client makes a geometric number of steps
`what_i <- what_i - gamma (g_i(what_i) - h_i)`; then `w = mean what_i` and
`h_i <- h_i + (p/gamma)(w - what_i)`, which a client does when it next hears from the server.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from symprune.fed.local import local_gradient, local_steps, probability, step_size
from symprune.fed.problem import Constants, Problem
from symprune.fed.protocol import (
    Algorithm,
    Message,
    Received,
    Sent,
    State,
    Turn,
    given,
    register,
    sample,
)


@register
@dataclass(frozen=True)
class ProxSkip(Algorithm):
    """Scaffnew: random communication, exact despite local steps, sqrt(kappa) rounds."""

    name = "proxskip"
    paper = "Prune at the clients, not the server, Algorithm 1 (ProxSkip/Scaffnew)"
    sends = "up: local model, dense; down: mean model"
    replies = ("what",)
    gamma: float | None = None
    p: float | None = None
    batch: int | None = None
    clip: float | None = None
    cohort_size: int | None = None
    random_steps: bool = True

    def prepare(self, constants: Constants) -> Algorithm:
        """gamma = 1/L_max, p = sqrt(gamma mu) (ProxSkip's theory)."""
        gamma = step_size(self.gamma, constants, self.name)
        return replace(self, gamma=gamma, p=probability(self.p, gamma, constants, self.name))

    # What the pruning variants change: four places where a vector may be made sparse.
    def after_step(self, what: Tensor) -> Tensor:
        return what

    def before_upload(self, what: Tensor) -> Tensor:
        return what

    def after_mean(self, w: Tensor) -> Tensor:
        return w

    def on_receipt(self, w: Tensor) -> Tensor:
        return w

    def upload_bits(self, what: Tensor) -> int | Tensor | None:
        return None

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {"x": x0, "pending": torch.zeros(turn.n, dtype=torch.bool)}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        zero = torch.zeros(problem.clients, problem.dimension, dtype=problem.dtype)
        pending = torch.zeros(problem.clients, dtype=torch.bool)
        return {"h": zero, "what": zero, "pending": pending}

    def cohort(self, server: State, turn: Turn) -> Tensor:
        return sample(self.cohort_size, turn)

    def listeners(self, server: State, turn: Turn) -> Tensor:
        """Those who worked last time still need the mean for their control variate."""
        return server["pending"].nonzero().squeeze(1)

    def listen(self, client: State, received: Received, turn: Turn) -> State:
        step = (given(self.p) / given(self.gamma)) * (received["x"] - client["what"])
        h = torch.where(client["pending"].unsqueeze(1), client["h"] + step, client["h"])
        return {**client, "h": h, "pending": torch.zeros_like(client["pending"])}

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        what, stream = self.on_receipt(received["x"]), turn.stream("batch")
        for _ in range(local_steps(given(self.p), turn, self.random_steps)):
            g = local_gradient(problem, what, self.batch, stream, self.clip)
            what = self.after_step(what - given(self.gamma) * (g - client["h"]))
        sent = self.before_upload(what)
        pending = torch.ones_like(client["pending"])
        state = {**client, "what": self.remembered(what, sent), "pending": pending}
        return state, {"what": Sent(sent, self.upload_bits(sent))}

    def remembered(self, what: Tensor, sent: Tensor) -> Tensor:
        """The vector the control variate is measured against: what was sent, or the sum of the
        control variates does not stay zero."""
        return sent

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        pending = torch.zeros_like(server["pending"])
        pending[turn.clients] = True
        return {"x": self.after_mean(replies["what"].mean(0)), "pending": pending}

    def memory(self, server: State, turn: Turn) -> State:
        zero = torch.zeros(turn.n, *server["x"].shape, dtype=server["x"].dtype)
        return {"h": zero, "what": zero, "pending": torch.zeros(turn.n, dtype=torch.bool)}

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        pending = torch.ones_like(memory["pending"])
        return {**memory, "what": replies["what"], "pending": pending}

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """`||sum h_i|| / mean ||h_i||`, zero up to rounding when the method is sound."""
        h = control_variates(self, server, client)
        size = float(h.norm(dim=1).mean())
        return {"h_sum": float(h.sum(0).norm()) / size if size else 0.0}


def control_variates(algorithm: ProxSkip, server: State, client: State) -> Tensor:
    """All `h_i` with the update of the last round done."""
    n = len(client["h"])
    turn = Turn(0, 0, n, torch.arange(n))
    return algorithm.listen(client, {"x": server["x"].expand(n, -1)}, turn)["h"]
