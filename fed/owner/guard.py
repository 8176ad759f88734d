"""A client's guard: a request that the owner's policy forbids is refused before data is touched,
and a private release is in the ledger before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from symprune.criteria import allow_code
from symprune.fed.owner.ledger import Ledger
from symprune.fed.owner.policy import (
    NOISE,
    PLAIN,
    PRUNING,
    SECURE_SUM,
    SETTING,
    SHARED_NOISE,
    TRAINING,
    Policy,
    policy_of,
)
from symprune.fed.privacy import Release


@dataclass(frozen=True)
class Guard:
    """The policy of one client, about one set of data. Data that is not the owner's alone, such as
    a public set that the server named, needs no protection."""

    policy: Policy
    data: str | None  # the owner's own

    def training(self, algorithm: str, clients: int) -> None:
        """Refuse a training job that is not allowed at all."""
        self.policy.check_job(TRAINING, algorithm, clients)

    def names(self, problem: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Refuse files that the server names, unless the owner has set its own or allows them. A
        node with neither a policy nor data of its own has nothing that masks could tell."""
        data, masks = str(problem.get("data", "")), problem.get("masks")
        if self.data is None and (":" in data or "/" in data):
            self.policy.check_named(data, "data")
        guarded = self.data is not None or SETTING in config
        if guarded and masks is not None and config.get("masks") is None:
            self.policy.check_named(str(masks), "masks")

    def step(
        self, release: Release | None, clip: float, samples: int, run: str, what: str,
        shared: bool = False,
    ) -> None:  # fmt: skip
        """Refuse, or write down, what one step of training is about to send: a private release, or
        None where it is the plain result. shared: the noise is enough with others' shares alone."""
        if self.data is None:
            return
        self.policy.check_samples(samples)
        self.promise(release, clip, shared)
        if release is not None:
            self.spend(release, what, run)

    def promise(self, release: Release | None, clip: float, shared: bool) -> None:
        """Refuse what is protected by less than the owner asks for, before anything is made."""
        if self.data is None:
            return
        noise = SHARED_NOISE if shared else NOISE
        self.policy.check_protection(PLAIN if release is None else noise)
        if release is not None:
            self.policy.check_noise(release.multiplier, clip)

    def pruning(self, aggregate: str, clients: int, samples: int) -> None:
        """Refuse a pruning job that is not allowed at all."""
        self.policy.check_job(PRUNING, aggregate, clients)
        if self.data is not None:
            self.policy.check_samples(samples)

    def sums(self, secure: bool, noise: float, clip: float, shared: bool = False) -> None:
        """Refuse to send sums that are protected by less than the owner asks for."""
        if self.data is None:
            return
        noisy = SHARED_NOISE if shared else NOISE
        self.policy.check_protection(noisy if noise else SECURE_SUM if secure else PLAIN)
        if noise:
            self.policy.check_noise(noise, clip)

    def cohort(self, participants: int) -> None:
        """Refuse a sum over fewer clients than the owner asks for."""
        if self.data is not None:
            self.policy.check_cohort(participants)

    def spend(self, release: Release, what: str, run: str) -> None:
        """Enter a private release in the owner's ledger, or refuse it."""
        if self.data is None:
            return
        file = self.policy.ledger_file(self.data)
        Ledger(file, self.policy.epsilon, self.policy.delta).spend(release, what, run)

    @property
    def tells_constants(self) -> bool:
        """Whether what was computed from all rows, without noise, may be told."""
        return self.data is None or self.policy.protection == PLAIN


UNGUARDED = Guard(Policy(least_clients=1), None)


def guard_of(config: Mapping[str, Any], data: Any) -> Guard:
    """The guard of a node: `data` is what its own settings name, if anything."""
    policy = policy_of(config)
    for name in policy.code:
        allow_code(name)
    own = policy.data if policy.data is not None else data
    return Guard(policy, None if own is None else str(own))
