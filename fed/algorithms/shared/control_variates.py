"""Control variates: what lets clients make many local steps without drifting apart.

ProxSkip and Scafflix share it. After a communication `h_i <- h_i + rate_i (x - sent_i)`, with x the
server's mean and sent_i what client i gave to it. A client does this when it next hears from the
server, so those who worked last time listen even if they are not drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Received, SampledClients, State, Turn


@dataclass(frozen=True)
class ControlVariates(SampledClients):
    """Base of the methods with an `h_i` per client. A subclass gives `variate_rate`."""

    def variate_rate(self, turn: Turn, like: Tensor) -> Tensor | float:
        """How far h_i goes along `x - sent_i`, `[C, 1]` or one number."""
        raise TypeError(f"{type(self).__name__} has no variate_rate.")

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {"x": x0, "pending": torch.zeros(turn.n, dtype=torch.bool)}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        zero = torch.zeros(problem.clients, problem.dimension, dtype=problem.dtype)
        return {"h": zero, "sent": zero, "pending": torch.zeros(problem.clients, dtype=torch.bool)}

    def listeners(self, server: State, turn: Turn) -> Tensor:
        """Those who worked last time still need the mean for their control variate."""
        return server["pending"].nonzero().squeeze(1)

    def listen(self, client: State, received: Received, turn: Turn) -> State:
        rate = self.variate_rate(turn, client["h"])
        step = rate * (received["x"] - client["sent"])
        h = torch.where(client["pending"].unsqueeze(1), client["h"] + step, client["h"])
        return {**client, "h": h, "pending": torch.zeros_like(client["pending"])}

    def await_mean(self, client: State, sent: Tensor) -> State:
        """A client's state after its work: h_i waits to be measured against `sent`."""
        return {**client, "sent": sent, "pending": torch.ones_like(client["pending"])}

    def memory(self, server: State, turn: Turn) -> State:
        zero = torch.zeros(turn.n, *server["x"].shape, dtype=server["x"].dtype)
        return {"h": zero, "sent": zero, "pending": torch.zeros(turn.n, dtype=torch.bool)}

    def publish_mean(self, server: State, x: Tensor, turn: Turn) -> State:
        """The server's state with the new mean, which the clients of the turn wait for."""
        pending = torch.zeros_like(server["pending"])
        pending[turn.clients] = True
        return {"x": x, "pending": pending}


def control_variates(algorithm: ControlVariates, server: State, client: State) -> Tensor:
    """All `h_i` with the update of the last round done."""
    n = len(client["h"])
    turn = Turn(0, 0, n, torch.arange(n))
    return algorithm.listen(client, {"x": server["x"].expand(n, -1)}, turn)["h"]
