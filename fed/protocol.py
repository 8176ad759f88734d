"""What an algorithm is: a few pure functions over explicit state, and the messages between them.

State and messages are dictionaries of tensors. Client functions work on a stack of clients, one row
each; alone on its machine a client is a stack of one. All randomness comes from the turn's streams,
so who runs where, in which order, and after which restart does not change a bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from symprune.errors import SympruneError, check
from symprune.fed.privacy import Release
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.randomness import Stream
from symprune.fed.wire.parcel import Message, Received, Sent

__all__ = [  # with the words of a message, which are the wire's
    "Algorithm",
    "LayeredModel",
    "Like",
    "Message",
    "Received",
    "SampledClients",
    "Sent",
    "State",
    "Turn",
    "check",
    "check_options",
    "filled",
    "given",
    "kept",
    "per_client",
    "sample",
]

T = TypeVar("T")
State = dict[str, Tensor]
POSITIVE = {"batch", "search_batch", "clip"}
"""Options that mean the same wherever they are."""


@dataclass(frozen=True)
class Like:
    """What one field of a client's reply must be. Without a shape it is a list of up to `most`
    values whose number the reply itself decides; `server_step` must then check that it fits."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None
    most: int = 0

    @property
    def values(self) -> int:
        return self.most if self.shape is None else math.prod(self.shape)


@dataclass(frozen=True)
class Turn:
    """One exchange: its number, the run's seed, how many clients there are, and the numbers of the
    clients a call is about (the rows of its stack; at the server, those who receive or replied)."""

    number: int
    seed: int
    n: int
    clients: Tensor

    def stream(self, purpose: str) -> Stream:
        """Randomness of its own for every client, one row each."""
        return Stream.of(self.seed, self.number, purpose, self.clients)

    def shared(self, purpose: str) -> Stream:
        """Randomness the server and every client agree on without sending it; one row."""
        return Stream.of(self.seed, self.number, purpose)

    def about(self, clients: Tensor) -> Turn:
        return replace(self, clients=clients)


@dataclass(frozen=True)
class Algorithm:
    """Base of all algorithms: frozen hyper-parameters and the functions below. A subclass must give
    `client_step` and `server_step`; the others have the usual default."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    sends: ClassVar[str] = ""
    replies: ClassVar[tuple[str, ...]] = ()  # fields of a reply that are vectors like the model
    averages: ClassVar[bool] = False  # the server goes by the replies' plain mean, clients do not
    follows_replies: ClassVar[bool] = False  # so does the server; of clients see `follow`

    def prepare(self, constants: Constants) -> Algorithm:
        """Fill in what was left None (step sizes, ...) from the problem's constants."""
        return self

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return {"x": x0}

    def client_init(self, problem: Problem, turn: Turn) -> State:
        """The state of the clients of `problem`, one row each, before the first turn."""
        return {}

    def cohort(self, server: State, turn: Turn) -> Tensor:
        """Numbers of the clients that work in this turn, ascending; default everyone."""
        return torch.arange(turn.n)

    def listeners(self, server: State, turn: Turn) -> Tensor:
        """Clients that get the broadcast but do not reply; default nobody."""
        return torch.empty(0, dtype=torch.int64)

    def broadcast(self, server: State, turn: Turn) -> Message:
        """What the server sends to cohort and listeners (`turn.clients`, ascending)."""
        return {"x": server["x"]}

    def listen(self, client: State, received: Received, turn: Turn) -> State:
        """What every recipient does on receipt, before the cohort works."""
        return client

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        """What a client does, and what it sends back: tensors with one row per client."""
        raise TypeError(f"{type(self).__name__} has no client_step.")

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """What the server does with the replies of `turn.clients`."""
        raise TypeError(f"{type(self).__name__} has no server_step.")

    def model(self, server: State) -> Tensor:
        """The shared model that is evaluated and returned, `[d]`."""
        return server["x"]

    def personal_models(self, server: State, client: State, problem: Problem) -> Tensor | None:
        """Each client's own model `[C, d]`, for algorithms that personalise."""
        return None

    def metrics(self, server: State, client: State) -> dict[str, float]:
        """Numbers of the algorithm's own for the history."""
        return {}

    # Across machines: what travels, whether it may run, what a reply may be, who must reply, and
    # what survives a client's disk.
    def settings(self) -> dict[str, Any]:
        """The hyper-parameters that travel to the clients."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "layout"}

    def located(self, layout: FlatLayout) -> Algorithm:
        """The algorithm where its model's layout is known, which is never sent."""
        return self

    def check_across_machines(self) -> None:
        """Raise a SympruneError if, as it was prepared, it must not leave the simulation."""

    def releases(self, rows: int) -> Release | None:
        """What one reply of a client with so many records spends of its privacy; None: the reply is
        plain, nothing protects it."""
        return None

    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        """What the reply of the one client of the turn must look like."""
        model = self.model(server)
        return {name: Like(model.dtype, tuple(model.shape)) for name in self.replies}

    def most_received(self, dimension: int) -> int:
        """No broadcast to one client has more values than this."""
        return 4 * dimension + 1024

    def needs_everyone(self, turn: Turn) -> bool:
        """Whether the turn makes no sense without the replies of the whole cohort."""
        return False

    def memory(self, server: State, turn: Turn) -> State:
        """The fields of the clients' states that the server can follow from what crosses the wire,
        one row per client, before the first turn. A client that lost its disk gets them back."""
        return {}

    def follow(self, memory: State, received: Received, replies: Received, turn: Turn) -> State:
        """What `client_step` makes of the followed fields; `listen` is applied to them as it is."""
        return memory


@dataclass(frozen=True)
class SampledClients(Algorithm):
    """Base of the algorithms whose cohort is drawn uniformly in every turn."""

    cohort_size: int | None = None  # None: everyone

    def cohort(self, server: State, turn: Turn) -> Tensor:
        return sample(self.cohort_size, turn)


@dataclass(frozen=True)
class LayeredModel(Algorithm):
    """Base of the algorithms that look at the model's layers and not at its flat vector alone. Of
    a tensor of the layout, `sizes` says how many weights the vector has: fewer than its shape when
    there are masks, and `gather` finds them."""

    layout: FlatLayout = field(default=FlatLayout((), ()), metadata={"filled": True})

    def located(self, layout: FlatLayout) -> Algorithm:
        return replace(self, layout=layout)


def filled(default: Any = None) -> Any:
    """A field that `prepare` takes from the problem: it travels with the algorithm to the clients
    but is nothing a user chooses."""
    return field(default=default, metadata={"filled": True})


def given(value: T | None) -> T:
    """A hyper-parameter that may be None until `prepare` has filled it in."""
    if value is None:
        raise TypeError("An algorithm must be prepared before it runs.")
    return value


def per_client(value: float | tuple[float, ...], turn: Turn, like: Tensor) -> Tensor:
    """A hyper-parameter as a column `[C, 1]` for the clients of the turn."""
    if not isinstance(value, tuple):
        return torch.full((len(turn.clients), 1), value, dtype=like.dtype)
    if len(value) != turn.n:
        raise SympruneError(f"{len(value)} values were given for {turn.n} clients.")
    return torch.tensor(value, dtype=torch.float64)[turn.clients].to(like.dtype).unsqueeze(1)


def sample(size: int | None, turn: Turn) -> Tensor:
    """`size` of the n clients, uniformly without replacement, ascending; None: everyone."""
    if size is None or size == turn.n:
        return torch.arange(turn.n)
    if not 1 <= size <= turn.n:
        raise SympruneError(f"Cannot choose {size} of {turn.n} clients.")
    return turn.shared("cohort").permutation(turn.n)[0, :size].sort().values


def check_options(algorithm: Algorithm) -> None:
    """Refuse values of the options that mean the same in every algorithm."""
    for option in POSITIVE & {f.name for f in fields(algorithm)}:
        value = getattr(algorithm, option)
        sentence = f"{algorithm.name}: {option} = {value} must be positive."
        check(value is None or value > 0, sentence)


def kept(sparsity: float, d: int) -> int:
    """`K = round((1 - sparsity) d)`, the number of weights that stay, at least one."""
    check(0 <= sparsity < 1, f"Sparsity {sparsity} is outside [0, 1).")
    return max(1, round((1 - sparsity) * d))
