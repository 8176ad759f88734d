"""Models of a shared and a personal part: client n has `y_n = A x + B z_n`.

Communication Efficient Training of Federated Model Over Unbalanced Labels, section IV. The server
keeps x and all z_n and sends a client what it needs of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.fed.algorithms.similarity_network.placement import Placement, make_placement
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Algorithm, Message, Received, Sent, State, Turn, filled


@dataclass(frozen=True)
class PersonalParts(Algorithm):
    """Which parameters are personal, and the models that follow from x and the z_n."""

    personal: str = "bias"  # bias, output, all, only, none, or a range such as 10:20
    names: tuple[str, ...] = filled(())  # the model's tensors
    shapes: tuple[tuple[int, ...], ...] = filled(())

    @property
    def placement(self) -> Placement:
        return make_placement(self.names, self.shapes, self.personal)

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        x, z = self.placement.parts(x0)
        return {"x": x, "z": z.expand(turn.n, -1).clone()}

    def broadcast(self, server: State, turn: Turn) -> Message:
        message: Message = {}
        if self.placement.shared_size:
            message["x"] = server["x"]
        if self.placement.personal_size:
            message["z"] = Sent(server["z"][turn.clients], each=True)
        return message

    def own_model(self, received: Received, problem: Problem) -> Tensor:
        """`y_n` from what a client received, `[C, d]`."""
        empty = torch.zeros(problem.clients, 0, dtype=problem.dtype)
        return self.placement.model(received.get("x", empty), received.get("z", empty))

    def model(self, server: State) -> Tensor:
        """The shared part with the mean personal part."""
        mean = server["z"].mean(0, keepdim=True)
        return self.placement.model(server["x"].unsqueeze(0), mean)[0]

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        z = server["z"][problem.numbers]
        return self.placement.model(server["x"].expand(len(z), -1), z)
