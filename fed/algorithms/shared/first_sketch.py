"""Methods whose first turn asks every client for a sketch of itself.

Clusters of clients and graphs between them are made from it, before the training begins. The turn
makes no sense with a part of the clients, and how long a sketch is, its own client decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Algorithm, Like, Message, Received, State, Turn

MAX_SKETCH = 1 << 20  # numbers a client may tell about itself


@dataclass(frozen=True)
class FirstSketch(Algorithm):
    """Sorts the turns: in the first `own_sketch` and `use_sketches`, in all others `work` and
    `combine`. A subclass gives these four, and `sketching` says whether there is such a turn."""

    def sketching(self, turn: Turn) -> bool:
        """Whether this turn gathers the sketches."""
        raise TypeError(f"{type(self).__name__} has no sketching.")

    def own_sketch(self, received: Received, problem: Problem, turn: Turn) -> Tensor:
        """What the clients tell about themselves, one row each."""
        raise TypeError(f"{type(self).__name__} has no own_sketch.")

    def use_sketches(self, server: State, sketches: Tensor, turn: Turn) -> State:
        """What the server makes of the sketches of all clients."""
        raise TypeError(f"{type(self).__name__} has no use_sketches.")

    def work(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        """A client's part of any other turn."""
        raise TypeError(f"{type(self).__name__} has no work.")

    def combine(self, server: State, replies: Received, turn: Turn) -> State:
        """The server's part of any other turn."""
        raise TypeError(f"{type(self).__name__} has no combine.")

    def work_like(self, server: State, turn: Turn) -> dict[str, Like]:
        """What a client's reply of any other turn looks like."""
        return super().reply_like(server, turn)

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        if self.sketching(turn):
            return client, {"sketch": self.own_sketch(received, problem, turn)}
        return self.work(client, received, problem, turn)

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        if self.sketching(turn):
            return self.use_sketches(server, replies["sketch"], turn)
        return self.combine(server, replies, turn)

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        if self.sketching(turn):
            return {"sketch": Like(self.model(server).dtype, None, MAX_SKETCH)}
        return self.work_like(server, turn)

    def needs_everyone(self, turn: Turn) -> bool:
        return self.sketching(turn)
