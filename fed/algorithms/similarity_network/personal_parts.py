"""Models of a shared and a personal part: client n has `y_n = A x + B z_n`.

Communication Efficient Training of Federated Model Over Unbalanced Labels, section IV. Every row of
A and B has at most one 1, so they are index maps. The gradient uses their transposes; the source's
inverses of rectangular matrices are read as such. The server keeps x and all z_n and sends a client
what it needs of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.devices import cached_per_device
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import LayeredModel, Message, Received, Sent, State, Turn


@dataclass(frozen=True)
class Placement:
    """`shared [d]` and `personal [d]`: which entry of x, of z, each model parameter takes; -1 none.
    Several parameters may take the same entry (tied), one may take both (they add up)."""

    shared: Tensor
    personal: Tensor

    @property
    def shared_size(self) -> int:
        return int(self.shared.max()) + 1

    @property
    def personal_size(self) -> int:
        return int(self.personal.max()) + 1

    @property
    def additive(self) -> bool:
        return bool(((self.shared >= 0) & (self.personal >= 0)).any())

    def parts(self, x0: Tensor) -> tuple[Tensor, Tensor]:
        """`x [d1]` and `z [d2]` with `A x + B z = x0` where parameters have a place: an entry goes
        to the shared part, or where there is none to the personal one."""
        x, z = x0.new_zeros(self.shared_size), x0.new_zeros(self.personal_size)
        x[self.shared[self.shared >= 0]] = x0[self.shared >= 0]
        alone = (self.personal >= 0) & (self.shared < 0)
        z[self.personal[alone]] = x0[alone]
        return x, z

    def model(self, x: Tensor, z: Tensor) -> Tensor:
        """`A x + B z` for rows `x [C, d1]`, `z [C, d2]`."""
        return _gather(self.shared, x) + _gather(self.personal, z)

    def shared_gradient(self, g: Tensor) -> Tensor:
        """`A^T g`, `[C, d1]`."""
        return _scatter(self.shared, g, self.shared_size)

    def personal_gradient(self, g: Tensor) -> Tensor:
        """`B^T g`, `[C, d2]`."""
        return _scatter(self.personal, g, self.personal_size)


@cached_per_device
def make_placement(layout: FlatLayout, personal: str) -> Placement:
    """`bias`: the output's biases are personal (softmax regression: the intercept column);
    `output`: the last layer; `all`: everything is shared and personal, added up; `only`: nothing
    is shared; `none`: nothing is personal; `10:20`: these entries of the flat model.
    With masks these are places in the whole model, of which the kept weights are taken."""
    names, shapes, sizes = layout.names, layout.shapes, layout.whole.sizes
    d = sum(sizes)
    if personal in ("all", "only", "none"):
        everything = torch.arange(layout.dimension)
        nothing = torch.full_like(everything, -1)
        shared = nothing if personal == "only" else everything
        return Placement(shared, nothing if personal == "none" else everything)
    own = torch.zeros(d, dtype=torch.bool)
    start, colon, stop = personal.partition(":")
    if colon and (start + stop).isdigit():
        own[int(start or 0) : int(stop or d)] = True
    elif personal == "output":
        last = names[-1].rpartition(".")[0]
        at = 0
        for name, size in zip(names, sizes, strict=True):
            own[at : at + size] = name.rpartition(".")[0] == last
            at += size
    elif personal == "bias" and names[-1].endswith("bias"):
        own[d - sizes[-1] :] = True
    elif personal == "bias" and len(names) == 1 and len(shapes[0]) == 2:
        own.view(shapes[0])[:, -1] = True
    elif personal == "bias":
        raise SympruneError("This model has no biases to be personal; choose personal=all.")
    else:
        raise SympruneError(
            f"personal = {personal!r} must be bias, output, all, only, none or a range like 10:20."
        )
    own = layout.gather(own)
    if not bool(own.any()):
        raise SympruneError(f"personal = {personal!r} names no entry of a model of {len(own)}.")
    count = lambda mask: torch.where(mask, mask.cumsum(0) - 1, -1)  # noqa: E731
    return Placement(count(~own), count(own))


def _gather(index: Tensor, values: Tensor) -> Tensor:
    padded = torch.cat([values, torch.zeros_like(values[:, :1])], 1)
    if values.shape[1] == 0:
        return values.new_zeros(len(values), len(index))
    return padded[:, index]


def _scatter(index: Tensor, g: Tensor, size: int) -> Tensor:
    place = torch.where(index < 0, size, index).expand_as(g)
    return g.new_zeros(len(g), size + 1).scatter_add(1, place, g)[:, :size]


@dataclass(frozen=True)
class PersonalParts(LayeredModel):
    """Which parameters are personal, and the models that follow from x and the z_n."""

    personal: str = "bias"  # bias, output, all, only, none, or a range such as 10:20

    @property
    def placement(self) -> Placement:
        return make_placement(self.layout, self.personal)

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
