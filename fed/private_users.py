"""User-level privacy for any algorithm whose server goes by the mean of its replies.

    simulate(private_users(build("fedavg"), UserPrivacy(clip=0.5, multiplier=1.0, rate=0.1)), ...)

DP-FedAvg (McMahan et al., Learning differentially private recurrent language models): a client
takes part by chance, its whole change of the model is clipped in l2 to whole numbers, the sum of
these gets discrete Gaussian noise once (`mechanism.py`) and is divided by the expected number of
clients. Adjacent are two federations of which one has a client where the other has none.

With `honest` nobody has to be trusted with the noise: each client adds a share of it to its whole
numbers, so large that the shares of so many honest clients are enough, whatever the others do or
leave out. Behind a secure sum (`secure/`), which adds just such numbers up, the server then never
sees anything but the noisy sum. A sum of discrete Gaussians this wide is one, up to far less than
delta (Kairouz, Liu and Steinke, The distributed discrete Gaussian mechanism). All clients are in
every sum, and whether a client's data are is a coin that it throws itself and tells nobody: so the
sampling counts against the server as well.

Control variates (ProxSkip and its sparse relatives) are measured against the clipped change, which
is what is counted, and need everyone in every round. What follows from a client's own data and from
noisy sums may steer what it sends next: releases compose adaptively. The sum of all h_i is then the
noise so far and not zero.
"""

from __future__ import annotations

import hmac
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from symprune.fed import privacy
from symprune.fed.mechanism import UNITS, Draw, clip_to_whole, release, seeded_draw, system_draw
from symprune.fed.problems.layout import FlatLayout
from symprune.fed.problems.problem import Constants, Problem
from symprune.fed.protocol import Algorithm, Message, Received, Sent, State, Turn, check

MODELS = ("w", "what")  # replies of these names are models; others are changes or gradients


@dataclass(frozen=True)
class UserPrivacy:
    """What becomes of a client's reply: its length at most, the noise of the sum in such lengths,
    and the chance by which a client takes part. honest: clients add the noise, of whom so many are
    counted on; else the server does. noise_seed makes the noise repeatable, for experiments
    only."""

    clip: float
    multiplier: float
    rate: float = 1.0
    honest: int | None = None
    noise_seed: int | None = None

    def __post_init__(self) -> None:
        lengths = (self.clip, self.multiplier)
        check(all(0 < value < math.inf for value in lengths), "clip and noise must be above 0.")
        check(0 < self.rate <= 1, f"A client takes part with a chance, not {self.rate}.")
        shared = self.honest is None or self.honest >= 1
        check(shared, "Clients share the noise where at least one of them is honest.")

    def epsilon(self, rounds: int, delta: float) -> float:
        """What so many rounds spend, for each client, against all who see the models."""
        return privacy.epsilon(self.rate, self.multiplier, rounds, delta)

    @property
    def share(self) -> float:
        """The noise of one client, in clipping lengths."""
        return self.multiplier / math.sqrt(self.honest or 1)

    def draw(self, turn: Turn, who: int, purpose: int = 0) -> Draw:
        """Randomness of one client, or of the server, for a turn's noise or (1) for its coin."""
        seed = self.noise_seed
        number = (turn.number * (turn.n + 1) + who) * 2 + purpose
        return system_draw if seed is None else seeded_draw((seed << 40) + number)

    def coin(self, turn: Turn, who: int) -> bool:
        """Whether a client's data are in a turn's sum, with a chance of no more than the rate."""
        return int(self.draw(turn, who, 1)(1)[0]) < int(self.rate * 2**64)


def private_users(algorithm: Algorithm, promised: UserPrivacy) -> PrivateUsers:
    """The algorithm with every client's reply clipped and their sum noised."""
    check(
        algorithm.averages or algorithm.follows_replies,
        f"{algorithm.name} does not go by the mean of its replies alone, so noise on their sum "
        "does not make it private.",
    )
    check(
        algorithm.averages or promised.rate == 1,
        f"{algorithm.name}'s control variates need everyone in every round: their sum would follow "
        "how many were drawn.",
    )
    return PrivateUsers(algorithm, promised)


@dataclass(frozen=True)
class PrivateUsers(Algorithm):
    """An algorithm, and what its replies go through. All else is the algorithm's own."""

    inner: Algorithm
    promised: UserPrivacy
    lots: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False, compare=False)
    """Who is drawn follows from these bytes of the system's, which nobody is told: with a seed that
    others know, sampling would hide nobody, and its epsilon would be false."""
    name = "private"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"private {self.inner.name}")

    def prepare(self, constants: Constants) -> Algorithm:
        return replace(self, inner=self.inner.prepare(constants))

    def server_init(self, x0: Tensor, turn: Turn) -> State:
        return self.inner.server_init(x0, turn)

    def client_init(self, problem: Problem, turn: Turn) -> State:
        return self.inner.client_init(problem, turn)

    def cohort(self, server: State, turn: Turn) -> Tensor:
        """Who is drawn, each by a coin of its own; if nobody is, the first client sends zeros.
        Where clients throw their coins themselves, everyone."""
        everyone = torch.arange(turn.n)
        if self.promised.honest is not None:
            return everyone
        drawn = self._drawn(turn.about(everyone)).nonzero().squeeze(1)
        return drawn if len(drawn) else everyone[:1]

    def listeners(self, server: State, turn: Turn) -> Tensor:
        return self.inner.listeners(server, turn)

    def _drawn(self, turn: Turn) -> Tensor:
        """Of the turn's clients, whose data are in the sum."""
        if self.promised.honest is not None:
            return torch.tensor([self.promised.coin(turn, who) for who in turn.clients.tolist()])
        return torch.tensor([self._is_drawn(turn, who) for who in turn.clients.tolist()])

    def _is_drawn(self, turn: Turn, who: int) -> bool:
        """The same whenever it is asked in a turn."""
        if self.promised.noise_seed is not None:
            return self.promised.coin(turn, who)
        about = turn.number.to_bytes(8, "big") + who.to_bytes(8, "big")
        place = int.from_bytes(hmac.digest(self.lots, about, "sha256")[:8], "big")
        return place < int(self.promised.rate * 2**64)

    def broadcast(self, server: State, turn: Turn) -> Message:
        return self.inner.broadcast(server, turn)

    def listen(self, client: State, received: Received, turn: Turn) -> State:
        return self.inner.listen(client, received, turn)

    def client_step(
        self, client: State, received: Received, problem: Problem, turn: Turn
    ) -> tuple[State, Message]:
        """The algorithm's own reply as whole numbers of a bounded length, which add up exactly. Who
        is not drawn has not worked."""
        after, message = self.inner.client_step(client, received, problem, turn)
        drawn = self._drawn(turn)
        check(len(message) == 1, f"{self.inner.name} replies with more than one vector.")
        ((name, sent),) = message.items()
        rows: Any = sent.tensor if isinstance(sent, Sent) else sent
        check(isinstance(rows, Tensor), f"{self.inner.name} replies with no vector.")
        change = rows - received["x"] if name in MODELS else rows
        whole = clip_to_whole(change.double() / self.promised.clip)
        if self.inner.follows_replies:
            counted = (whole.double() * (self.promised.clip / UNITS)).to(rows.dtype)
            counted = received["x"] + counted if name in MODELS else counted
            after = self.inner.follow(client, received, {name: counted}, turn)
        state = {key: _where(drawn, after[key], before) for key, before in client.items()}
        whole = whole * drawn.unsqueeze(1)
        return state, {name: whole if self.promised.honest is None else self._noised(whole, turn)}

    def _noised(self, whole: Tensor, turn: Turn) -> Tensor:
        """Every client's own share of the noise on its own row."""
        draws = [self.promised.draw(turn, who) for who in turn.clients.tolist()]
        pairs = zip(whole, draws, strict=True)
        return torch.stack([release(row, self.promised.share, draw) for row, draw in pairs])

    def server_step(self, server: State, replies: Received, turn: Turn) -> State:
        """The noisy sum over the expected number of clients stands for every reply's mean."""
        ((name, rows),) = replies.items()
        total, expected = rows.sum(0), self.promised.rate * turn.n
        if self.promised.honest is None:
            total = release(total, self.promised.multiplier, self.promised.draw(turn, turn.n))
        else:
            expected = self.promised.rate * len(turn.clients)
        return self.sum_step(server, {name: total}, expected, turn)

    def sum_step(
        self, server: State, totals: Mapping[str, Tensor], expected: float, turn: Turn
    ) -> State:
        """What becomes of the noisy sum of the turn's clients, of whom so many were expected."""
        ((name, total),) = totals.items()
        sent = self.inner.broadcast(server, turn)["x"]
        model = sent.tensor if isinstance(sent, Sent) else sent
        assert isinstance(model, Tensor)
        mean = (total.double() * (self.promised.clip / UNITS / expected)).to(model.dtype)
        mean = model + mean if name in MODELS else mean
        rows = mean.expand(len(turn.clients), *mean.shape)
        return self.inner.server_step(server, {name: rows}, turn)

    def model(self, server: State) -> Tensor:
        return self.inner.model(server)

    def metrics(self, server: State, client: State) -> dict[str, float]:
        return self.inner.metrics(server, client)

    def located(self, layout: FlatLayout) -> Algorithm:
        return replace(self, inner=self.inner.located(layout))

    def most_received(self, dimension: int) -> int:
        return self.inner.most_received(dimension)

    def check_across_machines(self) -> None:
        self.inner.check_across_machines()
        check(
            self.promised.honest is not None,
            "Across machines clients add the noise themselves: say on how many honest ones each "
            "may count.",
        )
        check(self.promised.noise_seed is None, "Noise that can be drawn again protects nothing.")

    def releases(self, rows: int) -> privacy.Release:
        return privacy.Release(self.promised.rate, self.promised.multiplier, unit=privacy.CLIENT)

    def settings(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.repr}


def _where(chosen: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Rows of one where chosen, else of the other."""
    return torch.where(chosen.view(-1, *[1] * (one.dim() - 1)), one, other)
