"""What a client's own data says about its weights: which to keep and which to grow.

FedSpa, Algorithm 2, with any criterion of the pruning engine in place of the magnitude. All is
measured on one batch of the client's rows, the same for both questions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from symprune.fed.algorithms.fedspa.local_scores import calibration_rows, weight_scores
from symprune.fed.problems.problem import Problem
from symprune.fed.protocol import Turn

GROWTHS = ("gradient", "random")


@dataclass(frozen=True)
class Calibration:
    """The criterion and the number of rows it sees."""

    score: str
    batch: int


def local_scores(w: Tensor, problem: Problem, turn: Turn, how: Calibration) -> Tensor:
    """Each client's score of every weight of its `w`, `[C, d]`."""
    rows = calibration_rows(problem, turn.stream("search"), how.batch)
    return weight_scores(how.score, problem, w, rows, turn.stream("score"))


def search_scores(
    w: Tensor, problem: Problem, turn: Turn, how: Calibration, grow: str
) -> tuple[Tensor, Tensor]:
    """The lowest of the first go, the highest of the second come: the criterion, and the size of
    the dense gradient (or chance)."""
    keep = local_scores(w, problem, turn, how)
    if grow == "random":
        return keep, turn.stream("grow").uniform(w.shape[1])
    plain = replace(problem, l2=0.0, nonconvex=0.0)  # the penalty must not choose weights
    rows = calibration_rows(problem, turn.stream("search"), how.batch)
    return keep, plain.gradient(w, rows).abs()
