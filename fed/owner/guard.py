"""A client's guard: a request that the owner's policy forbids is refused before data is touched,
and a private release is in the ledger before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from symprune.criteria import grant_code
from symprune.fed.owner.ledger import Ledger
from symprune.fed.owner.places import is_public, places_of
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
    a public set that the server named, needs no protection. public: the data are a published set
    that the owner named, with a policy: its lines hold, and no budget is spent."""

    policy: Policy
    data: str | None  # the owner's own
    public: bool = False

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

    def code(self, name: str, what: str, config: Mapping[str, Any]) -> None:
        """Refuse a model or data that is code, unless the policy lists it; without a policy the
        node's settings are the owner's word."""
        if SETTING in config:
            self.policy.check_code(name, what)

    def spend(self, release: Release, what: str, run: str) -> None:
        """Enter a private release in the owner's ledger, or refuse it."""
        if self.data is not None and not self.public:
            ledger_of(self.policy, self.data).spend(release, what, run)

    @property
    def tells_constants(self) -> bool:
        """Whether what was computed from all rows, without noise, may be told."""
        return self.data is None or self.policy.protection == PLAIN


UNGUARDED = Guard(Policy(least_clients=1), None)


def ledger_of(policy: Policy, data: str) -> Ledger:
    """The ledger, as far as these data are concerned."""
    return Ledger(policy.ledger_file, policy.epsilon, policy.delta, places_of(data))


def guard_of(config: Mapping[str, Any], data: Any) -> Guard:
    """The guard of a node: `data` is what its own settings name, if anything."""
    policy = policy_of(config)
    grant_code(policy.code)  # what it listed before is withdrawn
    own = policy.data if policy.data is not None else data
    return Guard(policy, None if own is None else str(own))


def guard_of_text(config: Mapping[str, Any], text: str) -> Guard:
    """The guard of a node that calibrates: without a policy it may tell all of published sets."""
    guard = guard_of(config, text)
    assert guard.data is not None
    if not is_public(guard.data):
        return guard
    return replace(guard, public=True) if SETTING in config else replace(guard, data=None)
