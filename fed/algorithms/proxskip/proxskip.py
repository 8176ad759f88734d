"""ProxSkip, in federated learning Scaffnew: local steps with control variates that sum to zero.

"Prune at the clients, not the server", Algorithm 1 (the variants that prune are in
`sparse_proxskip.py`). Between two communications a client makes a geometric number of steps
`what_i <- what_i - gamma (g_i(what_i) - h_i)`; then `w = mean what_i` and
`h_i <- h_i + (p/gamma)(w - what_i)`. By theory gamma = 1/L_max and p = sqrt(gamma mu).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from symprune.fed.algorithms.proxskip.control_variates import ControlVariates, control_variates
from symprune.fed.algorithms.shared.local_steps import LocalSteps
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Message, Received, Sent, State, Turn, given
from symprune.fed.registry import register


@register
@dataclass(frozen=True)
class ProxSkip(LocalSteps, ControlVariates):
    """Scaffnew: random communication, exact despite local steps, sqrt(kappa) rounds."""

    name = "proxskip"
    paper = "Prune at the clients, not the server, Algorithm 1 (ProxSkip/Scaffnew)"
    sends = "up: local model, dense; down: mean model"
    replies = ("what",)

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

    def variate_rate(self, turn: Turn, like: Tensor) -> Tensor | float:
        return given(self.p) / given(self.gamma)

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        what = self.on_receipt(received["x"])
        for gradient in self.gradients(problem, turn):
            step = given(self.gamma) * (gradient(what) - client["h"])
            what = self.after_step(what - step)
        sent = self.before_upload(what)
        state = self.worked(client, self.remembered(what, sent))
        return state, {"what": Sent(sent, self.upload_bits(sent))}

    def remembered(self, what: Tensor, sent: Tensor) -> Tensor:
        """The vector the control variate is measured against: what was sent, or the sum of the
        control variates does not stay zero."""
        return sent

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        return self.averaged(server, self.after_mean(replies["what"].mean(0)), turn)

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        return self.worked(memory, replies["what"])

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """`||sum h_i|| / mean ||h_i||`, zero up to rounding when the method is sound."""
        h = control_variates(self, server, client)
        size = float(h.norm(dim=1).mean())
        return {"h_sum": float(h.sum(0).norm()) / size if size else 0.0}
