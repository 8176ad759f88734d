"""What an algorithm is: a few pure functions over explicit state, and the messages between them.

State and messages are dictionaries of tensors. Client functions work on a stack of clients, one row
each; alone on its machine a client is a stack of one. All randomness comes from the turn's streams,
so who runs where, in which order, and after which restart does not change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from symprune.errors import SympruneError
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.randomness import Stream

T = TypeVar("T")
State = dict[str, Tensor]
Received = dict[str, Any]  # name -> stacked rows [C, ...], or a list of C tensors if sent ragged


@dataclass(frozen=True)
class Sent:
    """A field of a message with more to say than its tensor.

    `each`: in a broadcast, row i is for recipient i (replies are always by row). `bits`: what the
    paper counts per message (a number or one per row; default 32 a float, 1 a bool). `table`: the
    values are quantised. A list of tensors is sent ragged, one of any length per client."""

    tensor: Tensor | list[Tensor]
    bits: int | Tensor | None = None
    table: bool = False
    each: bool = False


Message = dict[str, "Tensor | Sent"]


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

    # Across machines: what a reply may be, who must reply, and what survives a client's disk.
    def reply_like(self, server: State, turn: Turn) -> dict[str, Like]:
        """What the reply of the one client of the turn must look like."""
        model = self.model(server)
        return {name: Like(model.dtype, tuple(model.shape)) for name in self.replies}

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


def filled(default: Any = None) -> Any:
    """A field that `prepare` takes from the problem: it travels with the algorithm to the clients
    but is nothing a user chooses."""
    return field(default=default, metadata={"filled": True})


def options_of(cls: type[Algorithm]) -> list[str]:
    """The names of the hyper-parameters a user may choose."""
    return [f.name for f in fields(cls) if not f.metadata.get("filled")]


ALGORITHMS: dict[str, type[Algorithm]] = {}
ALIASES = {"scaffnew": "proxskip"}


def register(cls: type[Algorithm]) -> type[Algorithm]:
    """Class decorator: the algorithm is found by its name from then on."""
    for needed in ("name", "paper", "sends"):
        if not getattr(cls, needed):
            raise TypeError(f"{cls.__name__} needs a class attribute {needed}.")
    if ALGORITHMS.get(cls.name, cls).__qualname__ != cls.__qualname__:
        raise TypeError(f"Two algorithms are called {cls.name}.")
    ALGORITHMS[cls.name] = cls
    return cls


def build(name: str, **options: Any) -> Algorithm:
    """The algorithm of this name with these hyper-parameters; unknown ones are named."""
    name = ALIASES.get(name, name)
    if name not in ALGORITHMS:
        known = ", ".join(sorted(ALGORITHMS))
        raise SympruneError(f"Unknown algorithm {name!r}; choose from {known}.")
    cls = ALGORITHMS[name]
    known_options = {f.name: f for f in fields(cls)}
    for option in options:
        if option not in known_options:
            listed = ", ".join(options_of(cls)) or "none"
            raise SympruneError(f"{name} has no option {option!r}; its options are {listed}.")
    for option, f in known_options.items():
        if f.default is MISSING and f.default_factory is MISSING and option not in options:
            raise SympruneError(f"{name} needs the option {option}.")
    typed = {o: _typed(name, o, v, str(known_options[o].type)) for o, v in options.items()}
    return cls(**typed)


def choose(name: str, **options: Any) -> Algorithm:
    """`build` for options that a user gave: what `prepare` fills in is not among them."""
    algorithm = build(name, **options)
    for option in options:
        fixed = option not in options_of(type(algorithm))
        check(not fixed, f"{name} takes {option} from the problem, it cannot be chosen.")
    return algorithm


def _typed(name: str, option: str, value: Any, kind: str) -> Any:
    """The value if its type fits the field's annotation; whole numbers may stand for floats and
    lists for tuples, since that is how they are typed on a command line."""
    kind = kind.replace("PerClient", "float | tuple")
    if isinstance(value, list | tuple) and "tuple" in kind:
        try:
            return _entries(value, kind.partition("tuple[")[2])
        except (TypeError, ValueError):
            raise SympruneError(f"{name}: {option} = {value!r} is not of type {kind}.") from None
    if isinstance(value, bool) or value is None:
        fits = ("bool" if isinstance(value, bool) else "None") in kind
    elif isinstance(value, int) and "int" not in kind and "float" in kind:
        return float(value)
    else:
        fits = type(value).__name__ in kind
    check(fits, f"{name}: {option} = {value!r} is not of type {kind}.")
    return value


def _entries(values: Sequence[Any], inner: str) -> tuple[Any, ...]:
    """A tuple whose entries are what its annotation says: whole numbers, words, tuples, floats."""
    if inner.startswith("tuple["):
        return tuple(_entries(v, inner.removeprefix("tuple[")) for v in values)
    kind = int if inner.startswith("int") else str if inner.startswith("str") else float
    return tuple(kind(v) for v in values)


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


def check(condition: bool, sentence: str) -> None:
    """Raise the sentence as a SympruneError unless the condition holds."""
    if not condition:
        raise SympruneError(sentence)


def kept(sparsity: float, d: int) -> int:
    """`K = round((1 - sparsity) d)`, the number of weights that stay, at least one."""
    check(0 <= sparsity < 1, f"Sparsity {sparsity} is outside [0, 1).")
    return max(1, round((1 - sparsity) * d))
