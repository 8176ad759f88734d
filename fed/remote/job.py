"""What is to be run, in a form that fits into a letter or a configuration file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from symprune.errors import SympruneError
from symprune.fed import snapshot
from symprune.fed.algorithms import Algorithm, build
from symprune.fed.devices import read_device
from symprune.fed.owner.policy import NOISE, PLAIN, SHARED_NOISE, TRAINING, Policy
from symprune.fed.private_users import PrivateUsers, UserPrivacy, private_users
from symprune.fed.problems.datasets import LOADERS
from symprune.fed.problems.make import CODE_FREE, make_problem
from symprune.fed.problems.models.user_code import allow_code, grant_code, is_code
from symprune.fed.problems.networks import NETWORKS
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import check
from symprune.fed.randomness import check_seed
from symprune.fed.robust import DEPLOYED, NONE, Defence, read_defence
from symprune.fed.secure.graph import check_clients, threshold
from symprune.validation import check_not_negative, has_kinds, parse_json

STATE = "state.safetensors"  # in the server's folder
CONTENT = {"algorithm": str, "options": dict, "problem": dict, "rounds": int, "seed": int}
CONTENT |= {"robust": str, "private": dict}
PRIVATE = {"clip": float, "multiplier": float, "rate": float, "honest": int, "delta": float}
KNOWN = {"model": CODE_FREE, "data": tuple(LOADERS)}  # by their first words: no user's code
LIMIT = "most_parameters"  # which a client sets for itself
PROBLEM = tuple(name for name in inspect.signature(make_problem).parameters if name != LIMIT)


@dataclass(frozen=True)
class TrainingJob:
    """An algorithm by name and options, the arguments of `make_problem`, rounds and seed."""

    server_main: ClassVar[str] = "train"
    client_module: ClassVar[str] = "symprune.fed.remote.client"
    result_file: ClassVar[str] = "history.json"
    extendable: ClassVar[bool] = True  # by more rounds

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    problem: dict[str, Any] = field(default_factory=dict)
    rounds: int = 10
    seed: int = 0
    robust: str = DEPLOYED  # a defence against hostile replies
    private: dict[str, Any] = field(default_factory=dict)
    """What is promised to every client, and to which delta; empty: nothing."""

    def __post_init__(self) -> None:
        check(self.rounds >= 1, f"There must be a round at least, not {self.rounds}.")
        check_clients(self.clients)
        check_not_negative(l2=float(self.problem.get("l2", 0)))
        check_seed(self.seed)
        for name in self.problem:
            check(name in PROBLEM, f"A problem has no setting {name!r}.")
        masks = self.problem.get("masks")
        check(masks is None or isinstance(masks, str), "A job names its masks by their file.")
        self._check_private()
        self.defence.check_for(self.build_algorithm())

    def _check_private(self) -> None:
        if not self.private:
            return
        known = self.private.keys() == PRIVATE.keys() and has_kinds(self.private, PRIVATE)
        check(known, f"A private job has {', '.join(PRIVATE)}, and these are numbers.")
        check(0 < self.delta < 1, f"delta must be between 0 and 1, not {self.delta}.")
        robust = self.defence.rule == NONE
        check(robust, "Nobody can compare replies that are hidden in a secure sum: robust is none.")
        self.build_algorithm()

    @property
    def promised(self) -> UserPrivacy:
        """What is promised to every client of a private job."""
        return UserPrivacy(**{k: v for k, v in self.private.items() if k != "delta"})

    @property
    def delta(self) -> float:
        return float(self.private["delta"])

    @property
    def defence(self) -> Defence:
        return read_defence(self.robust)

    def build_algorithm(self) -> Algorithm:
        algorithm = build(self.algorithm, **self.options)
        return private_users(algorithm, self.promised) if self.private else algorithm

    def with_prepared(self, algorithm: Algorithm) -> TrainingJob:
        """The same with every hyper-parameter filled in, so that clients need no constants."""
        algorithm = algorithm.inner if isinstance(algorithm, PrivateUsers) else algorithm
        return replace(self, algorithm=algorithm.name, options=algorithm.settings())

    def whole_problem(self) -> Problem:
        """As the server has it, whose own job this is: it may name code."""
        allow_code(*(s for s in map(self.problem.get, ("data", "model")) if isinstance(s, str)))
        return _problem(json.dumps(self.problem, sort_keys=True))

    @property
    def clients(self) -> int:
        return int(self.problem.get("clients", 10))

    @property
    def title(self) -> str:
        return self.algorithm

    def policy(self, own: Mapping[str, Any]) -> Policy:
        """What an owner who wants just this, and has set that, allows."""
        return replace(self._policy(), code=tuple(self.own_code(own).values()))

    def _policy(self) -> Policy:
        if self.private:
            return self._private_policy()
        options = {"epsilon": None, **self.options}
        names = map(self.problem.get, ("data", "masks"))
        private = self.algorithm == "ldp-fedp3"
        policy = Policy(
            jobs=(TRAINING,),
            algorithms=(self.build_algorithm().name,),
            protection=NOISE if private else PLAIN,
            least_clients=min(self.clients, threshold(self.clients)),
            may_name=tuple(str(name) for name in names if name and "/" in str(name)),
            most_parameters=self._most_parameters(),
        )
        spent = options["epsilon"]
        return replace(policy, epsilon=float(spent)) if private and spent else policy

    def _private_policy(self) -> Policy:
        promised, data = self.promised, (self.problem.get(name) for name in ("data", "masks"))
        return Policy(
            jobs=(TRAINING,),
            algorithms=(build(self.algorithm, **self.options).name,),
            protection=SHARED_NOISE if (promised.honest or 1) > 1 else NOISE,
            least_noise=promised.multiplier,
            least_clip=promised.clip,
            most_clip=promised.clip,
            least_clients=threshold(self.clients),
            epsilon=promised.epsilon(self.rounds, self.delta),
            delta=self.delta,
            may_name=tuple(str(name) for name in data if name and "/" in str(name)),
            most_parameters=self._most_parameters(),
        )

    def _most_parameters(self) -> int:
        """As many as any network by name has, or this one if its widths make it larger."""
        named = str(self.problem.get("model")).partition(":")
        larger = self.whole_problem().dimension if named[0] in NETWORKS and named[2] else 0
        return max(Policy.most_parameters, larger)

    def steps_done(self, folder: Path) -> int:
        """The rounds the server has finished and saved."""
        file = folder / STATE
        return snapshot.load(file).turn if file.exists() else 0

    def client_problem(
        self, number: int, data: str | None = None, masks: str | None = None,
        most_parameters: int | None = None, device: str = "cpu",
    ) -> Problem:  # fmt: skip
        """One client's part of the problem, or, with `data`, rows that only it has. `masks`: where
        the client keeps its file of the masks, if not where the server does. most_parameters: of a
        network that the job names. device: of the client's machine, where its part is put."""
        here = dict(self.problem) if masks is None else {**self.problem, "masks": masks}
        if most_parameters is not None:
            here[LIMIT] = most_parameters
        if data is None:
            whole = _problem(json.dumps(here, sort_keys=True), device)
            return whole.select(torch.tensor([number]))
        weighting = self.problem.get("weighting", "mean")
        check(weighting != "size", "Weighting size needs rows that are shared out, not own data.")
        own = {**here, "data": data, "split": "iid", "clients": 1}
        alone = _problem(json.dumps(own, sort_keys=True), device)
        return replace(alone, ids=torch.tensor([number]))

    @staticmethod
    def own_code(owner: Mapping[str, Any]) -> dict[str, str]:
        """What of an owner's settings is code, by what it is."""
        found = {what: owner.get(what) for what in KNOWN}
        return {what: str(name) for what, name in found.items() if is_code(name, KNOWN[what])}

    def with_own_code(self, owner: Mapping[str, Any], number: int) -> TrainingJob:
        """The same with code that the owner of this client has named and no other: a server's
        letter may say that a model or data is code, never which."""
        own = dict(self.problem)
        grant_code(*self.own_code(owner).values())
        for what, known in KNOWN.items():
            mine = owner.get(what)
            named = mine is not None and (what == "data" or is_code(mine, known))
            check(
                named or not is_code(own.get(what), known),
                f"The server's {what} {own.get(what)} is code, which client {number} does not take "
                f"from it: its owner must set {what} to code of this machine.",
            )
            if named and what == "model":
                own["model"] = str(mine)
        return replace(self, problem=own)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def identity(problem: Problem) -> dict[str, str]:
    """What client and server must have in common and never send: the masks, and of a module what
    training leaves alone."""
    fixed = getattr(problem.loss, "digest", "")
    return {"masks": problem.layout.digest, "parameters that are not trained": fixed}


def job_from_json(text: str) -> TrainingJob:
    """The inverse of `Job.to_json`; anything else is refused in one sentence."""
    try:
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError("it is not names and values")
        known = {f.name for f in fields(TrainingJob)}
        given = {name: content[name] for name in content if name in known}
        usual = {"options": {}, "problem": {}, "rounds": 1, "seed": 0, "robust": DEPLOYED}
        usual["private"] = {}
        if not has_kinds({**usual, **given}, CONTENT):
            raise ValueError("a value is not of its kind")
        return TrainingJob(**given)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        if isinstance(error, SympruneError):
            raise
        raise SympruneError(f"A job's description cannot be read: {error}.") from None


@lru_cache(maxsize=4)
def _problem(settings: str, device: str = "cpu") -> Problem:
    problem = make_problem(**json.loads(settings))
    return problem if device == "cpu" else problem.to(read_device(device))
