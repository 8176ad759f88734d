"""The owner's policy: one YAML file on the client's machine <-> one dataclass, checked.

What a server asks for is compared with it before any data is touched, in training as in pruning; a
request that breaks it is refused in one sentence. Without a file the defaults here are in force.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from symprune.errors import OwnersAffair, Refusal, SympruneError
from symprune.machine import durable
from symprune.validation import (
    cast_option,
    check_names,
    check_small_file,
    parse_yaml,
    read_numbers,
)

TRAINING, PRUNING = "training", "pruning"
PLAIN, SECURE_SUM, SHARED_NOISE, NOISE = "plain", "secure-sum", "shared-noise", "noise"
PROTECTIONS = (
    PLAIN,
    SECURE_SUM,
    SHARED_NOISE,
    NOISE,
)  # each says less of the data than the one before it
HOME = "SYMPRUNE_HOME"
LEDGER = "ledger.jsonl"
SETTING = "policy"  # in a node's configuration: where its policy file is
HEADER = """\
# What a server may ask of this machine. `symprune fed policy check FILE` reads it back; every line
# that is left out has the value it has here. docs/federated/owners.md explains them.
"""


@dataclass(frozen=True)
class Policy:
    """What a server may ask for.

    jobs and algorithms: the kinds that are answered; no algorithms means any that is installed; of
    pruning these are `statistics`, `votes` and `average`. protection: the least that must protect
    what leaves, `plain`, `secure-sum`, `shared-noise` (in a secure sum, enough together with other
    honest clients' shares) or `noise`. least_noise: the noise multiplier; least_clip and
    most_clip: what may be clipped to. least_clients: of the run and of every sum; least_samples:
    rows, or windows of text, that must be there. most_parameters: of a network that a server
    names. epsilon, delta: the budget of all runs together. data: the only data that is used,
    whatever the server names; may_name: files of data or masks that a server may name.
    model_digest: of parameters, configuration and tokenizer. code: `module:function`s that may be
    loaded. ledger, audit: where these files are.
    """

    jobs: tuple[str, ...] = (TRAINING, PRUNING)
    algorithms: tuple[str, ...] = ()
    protection: str = NOISE
    least_noise: float = 0.3
    least_clip: float = 1e-6
    most_clip: float = 100.0
    least_clients: int = 2
    least_samples: int = 1
    most_parameters: int = 20_000_000
    epsilon: float = 8.0
    delta: float = 1e-5
    data: str | None = None
    may_name: tuple[str, ...] = ()
    model_digest: str | None = None
    code: tuple[str, ...] = ()
    ledger: str | None = None
    audit: str | None = None

    def __post_init__(self) -> None:
        for job in self.jobs:
            _check(job in (TRAINING, PRUNING), f"jobs are {TRAINING} and {PRUNING}, not {job!r}")
        known = ", ".join(PROTECTIONS)
        _check(self.protection in PROTECTIONS, f"protection is one of {known}")
        clips = 0 < self.least_clip <= self.most_clip < math.inf
        _check(clips, "the clip bounds are above 0, the least not above the most")
        _check(0 <= self.least_noise < math.inf, "least_noise is not negative")
        _check(self.least_clients >= 1 and self.least_samples >= 1, "least numbers are 1 or more")
        _check(self.most_parameters >= 1, "most_parameters is 1 or more")
        budget = 0 < self.epsilon < math.inf and 0 < self.delta < 1
        _check(budget, "epsilon is above 0 and delta within (0, 1)")

    def check_job(self, job: str, algorithm: str, clients: int) -> None:
        """Refuse a kind of job, an algorithm or a cohort that the owner does not allow."""
        _refuse(job not in self.jobs, f"no {job} is allowed here")
        other = bool(self.algorithms) and algorithm not in self.algorithms
        _refuse(other, f"{algorithm} is not among its algorithms")
        self.check_cohort(clients)

    def check_cohort(self, clients: int) -> None:
        """Refuse so few clients, of a run or of a sum."""
        few = clients < self.least_clients
        _refuse(few, f"{clients} clients are fewer than {self.least_clients}")

    def check_noise(self, multiplier: float, clip: float) -> None:
        """Refuse noise or a clip outside of the owner's bounds."""
        little = not multiplier >= self.least_noise or not multiplier > 0
        _refuse(little, f"a noise multiplier of {multiplier:g} is below {self.least_noise:g}")
        inside = self.least_clip <= clip <= self.most_clip
        bounds = f"[{self.least_clip:g}, {self.most_clip:g}]"
        _refuse(not inside, f"a clip of {clip:g} is outside {bounds}")

    def check_protection(self, offered: str) -> None:
        """Refuse to send what is protected by less than the owner asks for."""
        less = PROTECTIONS.index(offered) < PROTECTIONS.index(self.protection)
        _refuse(less, f"what would be sent is {_IN_WORDS[offered]}, it asks for {self.protection}")

    def check_samples(self, samples: int) -> None:
        """Refuse to answer about so few rows or windows."""
        few = samples < self.least_samples
        _refuse(few, f"its samples are fewer than {self.least_samples}")

    def check_model(self, digest: Tensor) -> None:
        """Refuse a model, a configuration or a tokenizer that is not the one the owner knows."""
        found = bytes(digest.tolist()).hex()
        other = self.model_digest is not None and found != self.model_digest
        sentence = f"model, configuration and tokenizer have the digest {found}"
        _refuse(other, f"{sentence}, not {self.model_digest}")

    def check_code(self, name: str, what: str) -> None:
        """Refuse code that the node's settings name and the policy does not."""
        listed = name in self.code or (what == "data" and name == self.data)
        _refuse(not listed, f"its own {what} is code that it does not list")

    def check_named(self, place: str, what: str) -> None:
        """Refuse a file that only the server named: it may be anywhere on this machine."""
        _refuse(place not in self.may_name, f"the server names the {what} {place!r} by a path")

    @property
    def ledger_file(self) -> Path:
        """Where releases are kept, of whatever data, whatever runs them in which folder."""
        return home() / LEDGER if self.ledger is None else Path(self.ledger).expanduser()

    def to_yaml(self) -> str:
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return HEADER + yaml.safe_dump(values, sort_keys=False)

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with durable.replace_file(file, 0o600) as new:
            new.write_text(self.to_yaml())


_IN_WORDS = {
    PLAIN: "not protected",
    SECURE_SUM: "hidden among others' alone",
    SHARED_NOISE: "hidden by noise that others add to",
    NOISE: "hidden by noise",
}


def read_policy(file: Path) -> Policy:
    """The policy in a file; what is wrong with it is named."""
    try:
        check_small_file(file, "The policy")
        values = parse_yaml(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SympruneError(f"The policy {file} cannot be read: {_first_line(error)}.") from None
    if not isinstance(values, Mapping):
        raise SympruneError(f"The policy {file} is not names and values.")
    kinds = {f.name: str(f.type) for f in fields(Policy)}
    check_names(values, list(kinds), f"The policy {file}")
    cast = {name: _cast(file, name, kinds[name], value) for name, value in values.items()}
    try:
        return Policy(**cast)
    except SympruneError as error:
        raise SympruneError(f"The policy {file} cannot be followed: {error}") from None


def policy_of(config: Mapping[str, Any]) -> Policy:
    """The policy that a node's configuration names, or the defaults. A file that is named and
    cannot be read allows nothing."""
    named = config.get(SETTING)
    try:
        return Policy() if named is None else read_policy(Path(str(named)))
    except SympruneError as error:
        raise OwnersAffair(str(error)) from None


def home() -> Path:
    """Where an owner's ledgers are unless the policy says otherwise."""
    return Path(os.environ.get(HOME) or Path.home() / ".symprune")


def _cast(file: Path, name: str, kind: str, value: Any) -> Any:
    if kind.startswith("tuple"):
        whole = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if not whole:
            raise SympruneError(f"The policy {file}: {name} is a list of names, not {value!r}.")
        return tuple(value)
    if isinstance(value, bool) or (value is None and "None" not in kind):
        raise SympruneError(f"The policy {file}: {name} cannot be {value!r}.")
    if "str" in kind:  # a digest may look like a number
        if not isinstance(value, str | None):
            raise SympruneError(f"The policy {file}: {name} is text, not {value!r}; quote it.")
        return value
    return cast_option(f"the policy {file}", name, kind, read_numbers(value))


def _check(condition: bool, sentence: str) -> None:
    if not condition:
        raise SympruneError(f"{sentence}.")


def _refuse(broken: bool, sentence: str) -> None:
    if broken:
        raise Refusal(f"The owner's policy refuses: {sentence}.")


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return (str(error).splitlines() or [type(error).__name__])[0]
