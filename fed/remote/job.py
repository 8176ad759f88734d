"""What is to be run, in a form that fits into a letter or a configuration file."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from symprune.errors import SympruneError
from symprune.fed import snapshot
from symprune.fed.algorithms import Algorithm, build
from symprune.fed.problems.make import make_problem
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import check
from symprune.fed.randomness import check_seed
from symprune.validation import check_not_negative, has_kinds, parse_json

STATE = "state.safetensors"  # in the server's folder
CONTENT = {"algorithm": str, "options": dict, "problem": dict, "rounds": int, "seed": int}
PROBLEM = tuple(inspect.signature(make_problem).parameters)


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

    def __post_init__(self) -> None:
        check(self.rounds >= 1, f"There must be a round at least, not {self.rounds}.")
        check(self.clients >= 1, f"There must be a client at least, not {self.clients}.")
        check_not_negative(l2=float(self.problem.get("l2", 0)))
        check_seed(self.seed)
        for name in self.problem:
            check(name in PROBLEM, f"A problem has no setting {name!r}.")
        masks = self.problem.get("masks")
        check(masks is None or isinstance(masks, str), "A job names its masks by their file.")
        self.build_algorithm()

    def build_algorithm(self) -> Algorithm:
        return build(self.algorithm, **self.options)

    def with_prepared(self, algorithm: Algorithm) -> TrainingJob:
        """The same with every hyper-parameter filled in, so that clients need no constants."""
        return replace(self, algorithm=algorithm.name, options=algorithm.settings())

    def whole_problem(self) -> Problem:
        return _problem(json.dumps(self.problem, sort_keys=True))

    @property
    def clients(self) -> int:
        return int(self.problem.get("clients", 10))

    @property
    def title(self) -> str:
        return self.algorithm

    def steps_done(self, folder: Path) -> int:
        """The rounds the server has finished and saved."""
        file = folder / STATE
        return snapshot.load(file).turn if file.exists() else 0

    def client_problem(
        self, number: int, data: str | None = None, masks: str | None = None
    ) -> Problem:
        """One client's part of the problem, or, with `data`, rows that only it has. `masks`: where
        the client keeps its file of the masks, if not where the server does."""
        if masks is not None:
            here = replace(self, problem={**self.problem, "masks": masks})
            return here.client_problem(number, data)
        if data is None:
            return self.whole_problem().select(torch.tensor([number]))
        weighting = self.problem.get("weighting", "mean")
        check(weighting != "size", "Weighting size needs rows that are shared out, not own data.")
        own = {**self.problem, "data": data, "split": "iid", "clients": 1}
        alone = _problem(json.dumps(own, sort_keys=True))
        return replace(alone, ids=torch.tensor([number]))

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def job_from_json(text: str) -> TrainingJob:
    """The inverse of `Job.to_json`; anything else is refused in one sentence."""
    try:
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError("it is not names and values")
        known = {f.name for f in fields(TrainingJob)}
        given = {name: content[name] for name in content if name in known}
        if not has_kinds({"options": {}, "problem": {}, "rounds": 1, "seed": 0, **given}, CONTENT):
            raise ValueError("a value is not of its kind")
        return TrainingJob(**given)
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        if isinstance(error, SympruneError):
            raise
        raise SympruneError(f"A job's description cannot be read: {error}.") from None


@lru_cache(maxsize=4)
def _problem(settings: str) -> Problem:
    return make_problem(**json.loads(settings))
