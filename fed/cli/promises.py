"""The options of private training, `--clip` and its companions: what is promised to every client.

One of `--epsilon` and `--noise` says how much noise; the other follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from symprune.cli import console
from symprune.errors import SympruneError

if TYPE_CHECKING:
    from symprune.fed.private_users import UserPrivacy

Clip = Annotated[
    float | None, typer.Option(help="Private training: a client's change is cut to this length.")
]
Epsilon = Annotated[float | None, typer.Option(help="What all rounds may spend, for each client.")]
Delta = Annotated[float, typer.Option(help="The delta of that epsilon.")]
Noise = Annotated[float | None, typer.Option(help="Instead of epsilon: noise, in clips.")]
Rate = Annotated[float, typer.Option(help="Chance by which a client's data are in a round.")]
Honest = Annotated[
    int | None, typer.Option(help="Clients share the noise; so many are counted on.")
]


def read_promise(
    clip: float | None, epsilon: float | None, delta: float, noise: float | None, rate: float,
    honest: int | None, rounds: int,
) -> UserPrivacy | None:  # fmt: skip
    """The promise that the options make; None where they make none."""
    given = {"epsilon": epsilon, "noise": noise, "honest": honest}
    extra = [name for name, value in given.items() if value is not None]
    extra += ["rate"] if rate != 1 else []
    if clip is None:
        if extra:
            raise SympruneError(f"--{extra[0]} is of private training, which needs --clip.")
        return None
    if (epsilon is None) == (noise is None):
        raise SympruneError("Private training needs --epsilon or --noise, and not both.")
    from symprune.fed import privacy
    from symprune.fed.private_users import UserPrivacy

    if noise is None:
        assert epsilon is not None
        UserPrivacy(clip, 1.0, rate, honest)  # what is wrong with these is said first
        noise = privacy.noise_multiplier(epsilon, delta, rate, rounds)
    return UserPrivacy(clip, noise, rate, honest)


def read_shared_promise(
    clip: float | None, epsilon: float | None, delta: float, noise: float | None, rate: float,
    honest: int | None, rounds: int, clients: int,
) -> dict[str, Any]:  # fmt: skip
    """The same across machines, where clients share the noise, as a job has it; without a number
    they count on as many honest ones as every secure sum of the run is sure to have."""
    from symprune.fed.secure import graph

    if clip is not None and honest is None:
        honest = graph.assured_after_losses(clients)
    promised = read_promise(clip, epsilon, delta, noise, rate, honest, rounds)
    if promised is None:
        return {}
    values = {name: getattr(promised, name) for name in ("clip", "multiplier", "rate", "honest")}
    return {**values, "delta": delta}


def say_promise(promised: UserPrivacy, delta: float, rounds: int, who: str) -> None:
    """What was promised, in a sentence."""
    spent = promised.epsilon(rounds, delta)
    console.say(
        f"Private: {rounds} rounds spend epsilon = {spent:.3g} at delta = {delta:g} for each "
        f"client, with noise of {promised.multiplier:.3g} clips; {who}. Noise and who is drawn are "
        "the system's, so no other run has these bits."
    )
